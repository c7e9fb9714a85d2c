#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fulgur.h"

namespace transformer_lm {

// The text of a file, or of each file under a folder in the order of their paths, as bytes. Hidden files and links are
// left out: many links name a text a second time. Throws std::runtime_error if there is nothing at `path`, it cannot be
// read or no file has a character.
std::vector<std::string> read_texts(const std::filesystem::path& path);

// A text cut in two: the last tenth of every file is held out, in one piece, and never trained on.
struct TextSplit {
  std::string train, val;
};
TextSplit split_texts(const std::vector<std::string>& texts);

// Bits per character of `val` for a model that knows only how often each byte occurs in `train`: the baseline for a
// model that reads. Each byte counts once more than it occurs, so that none is impossible.
double order_0_bpc(const TextSplit& split);

// Windows of `length` characters of a text, one beginning every `stride` characters. Samples: "tokens", uint8
// [length]. A window may reach from the end of one file into the next.
class TextWindows final : public fulgur::Dataset {
 public:
  // Throws UsageError if there is no window: the text is shorter than `length`.
  TextWindows(const std::string& text, int64_t length, int64_t stride = 1);

  int64_t size() const override { return windows_.size(0); }
  fulgur::Batch get(int64_t index, fulgur::Random&) const override { return {{"tokens", windows_[index]}}; }
  fulgur::Batch get_batch(const at::Tensor& indices, std::span<fulgur::Random> random) const override;

 private:
  at::Tensor windows_;  // uint8 [size, length], a view of the text
};

struct TextDataOptions {
  std::string path = "/usr/share/common-licenses";  // present on every Debian; 0.2 million characters
  int64_t batch_size = 32;                          // windows of context + 1 characters
  int64_t batches_per_epoch = 100;                  // training batches from one validation to the next
  int64_t context = 64;                             // characters that the model looks back on
  void describe(fulgur::FieldVisitor& visit);
};

// Training: windows from anywhere in the text, drawn by `seed` and differently in every epoch. Validation: the
// held-out text in windows that do not overlap; a shorter rest is left out. The texts are read in setup().
class TextData final : public fulgur::DataModule {
 public:
  using Options = TextDataOptions;
  TextData(Options options, uint64_t seed);
  void setup(fulgur::EntryPoint entry_point) override;
  std::shared_ptr<fulgur::Loader> train_dataloader() override;
  fulgur::LoaderList val_dataloader() override;

  uint64_t seed() const { return seed_; }
  const TextSplit& text() const { return text_; }  // empty before setup()

 private:
  int64_t window() const { return options_.context + 1; }  // characters

  Options options_;
  uint64_t seed_;
  TextSplit text_;
};

}  // namespace transformer_lm
