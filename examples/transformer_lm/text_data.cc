#include "examples/transformer_lm/text_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace transformer_lm {
namespace {

namespace fs = std::filesystem;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

std::vector<fs::path> files_under(const fs::path& folder) {
  std::vector<fs::path> files;
  for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::end(entry); ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && !entry->is_symlink()) {
      files.push_back(entry->path());
    }
  }
  std::ranges::sort(files);
  return files;
}

std::string read_text(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw std::runtime_error(fmt::format("cannot read '{}'", file.string()));
  return text;
}

// The first `size` samples of a shuffled epoch.
class Draw final : public fulgur::Sampler {
 public:
  Draw(int64_t num_samples, int64_t size, uint64_t seed)
      : all_(num_samples, seed), size_(std::min(size, num_samples)) {}
  at::Tensor indices(int64_t epoch) const override { return all_.indices(epoch).slice(0, 0, size_); }
  int64_t size() const override { return size_; }

 private:
  fulgur::RandomSampler all_;
  int64_t size_;
};

}  // namespace

std::vector<std::string> read_texts(const fs::path& path) {
  if (!fs::exists(path)) {
    throw std::runtime_error(fmt::format(
        "there is no file or folder '{}'; name a text, or a folder of texts, with --data.path", path.string()));
  }
  std::vector<std::string> texts;
  for (const fs::path& file : fs::is_directory(path) ? files_under(path) : std::vector{path}) {
    if (std::string text = read_text(file); !text.empty()) texts.push_back(std::move(text));
  }
  if (texts.empty()) throw std::runtime_error(fmt::format("there is no text in '{}'", path.string()));
  return texts;
}

TextSplit split_texts(const std::vector<std::string>& texts) {
  TextSplit split;
  for (const std::string& text : texts) {
    const size_t cut = text.size() - text.size() / 10;
    split.train += text.substr(0, cut);
    split.val += text.substr(cut);
  }
  return split;
}

double order_0_bpc(const TextSplit& split) {
  std::array<double, 256> counts;
  counts.fill(1.0);
  for (const char c : split.train) ++counts[static_cast<uint8_t>(c)];
  const double total = static_cast<double>(split.train.size() + counts.size());
  double bits = 0.0;
  for (const char c : split.val) bits -= std::log2(counts[static_cast<uint8_t>(c)] / total);
  return bits / static_cast<double>(split.val.size());
}

TextWindows::TextWindows(const std::string& text, int64_t length, int64_t stride) {
  if (std::ssize(text) < length) {
    throw fulgur::UsageError(
        fmt::format("a part of the text has {} characters, but a window of context + 1 needs {}; "
                    "give more text with --data.path, or a smaller --model.context",
                    text.size(), length));
  }
  windows_ = torch::tensor(std::vector<uint8_t>(text.begin(), text.end()), at::kByte).unfold(0, length, stride);
}

fulgur::Batch TextWindows::get_batch(const at::Tensor& indices, std::span<fulgur::Random>) const {
  return {{"tokens", windows_.index_select(0, indices)}};
}

void TextDataOptions::describe(fulgur::FieldVisitor& visit) {
  visit({.name = "path", .help = "a text, or a folder of texts"}, &path);
  visit({.name = "batch_size", .help = "windows of context + 1 characters per step", .min = 1}, &batch_size);
  visit({.name = "batches_per_epoch", .help = "batches from one validation to the next", .min = 1}, &batches_per_epoch);
}

TextData::TextData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void TextData::setup(fulgur::EntryPoint) {
  if (text_.train.empty()) text_ = split_texts(read_texts(options_.path));
}

std::shared_ptr<fulgur::Loader> TextData::train_dataloader() {
  const auto windows = std::make_shared<TextWindows>(text_.train, window());
  const auto draw = std::make_shared<Draw>(windows->size(), options_.batches_per_epoch * options_.batch_size, seed_);
  return fulgur::DataLoader::make(windows, {.batch_size = options_.batch_size, .sampler = draw});
}

fulgur::LoaderList TextData::val_dataloader() {
  return fulgur::DataLoader::make(std::make_shared<TextWindows>(text_.val, window(), /*stride=*/options_.context),
                                  {.batch_size = options_.batch_size});
}

}  // namespace transformer_lm
