#include "examples/bert_classifier/labelled_texts.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace bert_classifier {
namespace {

using namespace fulgur;
namespace fs = std::filesystem;

constexpr size_t kShortest = 60;         // bytes of a paragraph
constexpr double kLargestOverlap = 0.5;  // the share of words that paragraphs of two classes may have in common
constexpr int64_t kFewest = 20;          // paragraphs of a class

std::string read_file(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw UsageError(fmt::format("cannot read '{}'", file.string()));
  return text;
}

// What is between empty lines, with one space between words.
std::vector<std::string> paragraphs_of(const std::string& text) {
  std::vector<std::string> paragraphs(1);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word)) {
      if (!paragraphs.back().empty()) paragraphs.emplace_back();
      continue;
    }
    do {
      paragraphs.back() += (paragraphs.back().empty() ? "" : " ") + word;
    } while (words >> word);
  }
  std::erase_if(paragraphs, [](const std::string& paragraph) { return paragraph.size() < kShortest; });
  return paragraphs;
}

// A paragraph, and which class it is from.
struct Paragraph {
  std::string text, name;
  std::vector<std::string> words;  // each once, sorted
};

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::set<std::string> words{std::istream_iterator<std::string>(stream), {}};
  return {words.begin(), words.end()};
}

std::vector<Paragraph> paragraphs_of_folder(const fs::path& folder) {
  std::set<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.insert(entry.path());
  }
  std::set<std::pair<std::string, std::string>> named;  // sorted, so that each text of a class is there once
  for (const fs::path& file : files) {
    const std::string name = file.filename().string();
    for (std::string& text : paragraphs_of(read_file(file)))
      named.emplace(std::move(text), name.substr(0, name.find('-')));
  }
  std::vector<Paragraph> paragraphs;
  for (const auto& [text, name] : named) paragraphs.push_back({.text = text, .name = name, .words = words_of(text)});
  return paragraphs;
}

// Whether one was written from the other, by the Jaccard index of their words.
bool is_copy(const Paragraph& a, const Paragraph& b) {
  std::vector<std::string> shared;
  std::ranges::set_intersection(a.words, b.words, std::back_inserter(shared));
  const auto num_shared = static_cast<double>(shared.size());
  return num_shared > kLargestOverlap * (static_cast<double>(a.words.size() + b.words.size()) - num_shared);
}

LabelledTexts read_folder(const fs::path& folder) {
  const std::vector<Paragraph> paragraphs = paragraphs_of_folder(folder);
  std::map<std::string, std::vector<const Paragraph*>> classes;
  for (const Paragraph& one : paragraphs) {
    const auto other_class_has = [&one](const Paragraph& other) {
      return other.name != one.name && is_copy(one, other);
    };
    if (std::ranges::none_of(paragraphs, other_class_has)) classes[one.name].push_back(&one);
  }
  std::erase_if(classes, [](const auto& item) { return std::ssize(item.second) < kFewest; });
  LabelledTexts all;
  for (const auto& [name, of_class] : classes) {
    for (const Paragraph* one : of_class) {
      all.texts.push_back(one->text);
      all.labels.push_back(std::ssize(all.classes));
    }
    all.classes.push_back(name);
  }
  return all;
}

LabelledTexts read_lines(const fs::path& file) {
  std::istringstream lines(read_file(file));
  std::vector<std::pair<std::string, std::string>> labelled;
  std::set<std::string> classes;
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab == std::string::npos) {
      throw UsageError(fmt::format("{}:{}: a line is a class, a tab and a text, but this one has no tab", file.string(),
                                   labelled.size() + 1));
    }
    labelled.emplace_back(line.substr(0, tab), line.substr(tab + 1));
    classes.insert(labelled.back().first);
  }
  LabelledTexts all{.classes = {classes.begin(), classes.end()}, .texts = {}, .labels = {}};
  for (auto& [name, text] : labelled) {
    all.labels.push_back(std::ranges::lower_bound(all.classes, name) - all.classes.begin());
    all.texts.push_back(std::move(text));
  }
  return all;
}

class TokenizedTexts final : public Dataset {
 public:
  TokenizedTexts(const LabelledTexts& all, const WordPiece& word_piece, int64_t max_length) : labels_(all.labels) {
    int64_t num_cut = 0;
    for (const std::string& text : all.texts) {
      std::vector<int64_t> tokens = word_piece.encode(text, max_length + 1);
      if (std::ssize(tokens) > max_length) {
        tokens = word_piece.encode(text, max_length);
        ++num_cut;
      }
      tokens_.push_back(std::move(tokens));
    }
    if (num_cut > 0) {
      log_info(
          "{} of {} texts have more than {} tokens (--data.max_length, or the positions of the model), and are cut "
          "there",
          num_cut, tokens_.size(), max_length);
    }
  }
  int64_t size() const override { return std::ssize(tokens_); }
  Batch get(int64_t index, Random&) const override {
    const auto place = static_cast<size_t>(index);
    const at::Tensor tokens = torch::tensor(tokens_[place], at::kLong);
    return {{"input_ids", tokens},
            {"attention_mask", torch::ones_like(tokens)},
            {"targets", torch::tensor(labels_[place])}};
  }

 private:
  std::vector<std::vector<int64_t>> tokens_;
  std::vector<int64_t> labels_;
};

}  // namespace

LabelledTexts read_labelled_texts(const fs::path& path) {
  if (!fs::exists(path)) {
    throw UsageError(
        fmt::format("there is no file or folder '{}': give lines \"class<tab>text\", or a folder of texts, with "
                    "--data.path",
                    path.string()));
  }
  LabelledTexts all = fs::is_directory(path) ? read_folder(path) : read_lines(path);
  if (all.classes.size() < 2) {
    throw UsageError(fmt::format("'{}' has {} texts of {} class{}; two classes or more can be told apart",
                                 path.string(), all.texts.size(), all.classes.size(),
                                 all.classes.size() == 1 ? "" : "es"));
  }
  return all;
}

void LabelledTextsOptions::describe(FieldVisitor& visit) {
  visit({.name = "path", .help = "lines \"class<tab>text\", or a folder whose files are the classes"}, &path);
  visit({.name = "vocabulary", .help = "vocab.txt of the model; default: in --model.weights"}, &vocabulary);
  visit({.name = "max_length", .help = "tokens of a text; longer ones are cut", .min = 2}, &max_length);
  visit({.name = "batch_size", .help = "texts per step", .min = 1}, &batch_size);
}

LabelledTextsData::LabelledTextsData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void LabelledTextsData::setup(EntryPoint) {
  if (train_ != nullptr) return;
  const WordPiece word_piece(options_.vocabulary);
  const auto all =
      std::make_shared<TokenizedTexts>(read_labelled_texts(options_.path), word_piece, options_.max_length);
  const auto parts = split(all, {0.8, 0.2}, seed_);
  train_ = parts[0];
  val_ = parts[1];
}

std::shared_ptr<Loader> LabelledTextsData::train_dataloader() {
  return DataLoader::make(
      train_, {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_, .collate = pad_to_longest()});
}

LoaderList LabelledTextsData::val_dataloader() {
  return DataLoader::make(val_, {.batch_size = options_.batch_size, .collate = pad_to_longest()});
}

}  // namespace bert_classifier
