#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/bert_classifier/word_piece.h"
#include "fulgur.h"

namespace bert_classifier {

// Texts, each with a class.
struct LabelledTexts {
  std::vector<std::string> classes;
  std::vector<std::string> texts;
  std::vector<int64_t> labels;  // for each text its place in `classes`
};

// A file of lines "class<tab>text", or a folder: each paragraph of a file is a text, and its class is the file's name
// up to the first '-' ("GPL" of GPL-2 and GPL-3). A folder's links, its paragraphs of less than 60 bytes, those that
// share more than half of their words with one of another class, and then classes of less than 20 paragraphs are left
// out. Throws UsageError, naming file and line, for a line without a tab, and if there are less than two classes.
LabelledTexts read_labelled_texts(const std::filesystem::path& path);

struct LabelledTextsOptions {
  std::string path = "/usr/share/common-licenses";  // present on every Debian
  std::string vocabulary;                           // vocab.txt of the model
  int64_t max_length = 96;                          // tokens of a text; what is longer is cut
  int64_t batch_size = 16;
  void describe(fulgur::FieldVisitor& visit);
};

// Batches: "input_ids" and "attention_mask", int64 [batch_size, length of the longest text], and "targets", int64
// [batch_size]. A fifth of the texts, drawn by the seed, is held out for validation.
class LabelledTextsData final : public fulgur::DataModule {
 public:
  using Options = LabelledTextsOptions;
  LabelledTextsData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList val_dataloader() override;

 private:
  Options options_;
  uint64_t seed_;
  std::shared_ptr<const fulgur::Dataset> train_, val_;
};

}  // namespace bert_classifier
