#include "examples/digits/digits_data.h"

#include <fmt/format.h>
#include <zlib.h>

#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/data/images/image_dataset.h"

namespace digits {
namespace {

constexpr int64_t kSide = 8, kPixels = kSide * kSide;
constexpr float kMaxPixel = 16;
constexpr int64_t kHeldOut = 360;

std::string read_gzip(const std::filesystem::path& path) {
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) {
    throw fulgur::UsageError(fmt::format("there is no data file '{}'; give its path with --data.file", path.string()));
  }
  std::string text;
  char chunk[1 << 16];
  int num_read = 0;
  while ((num_read = gzread(file, chunk, sizeof(chunk))) > 0) text.append(chunk, static_cast<size_t>(num_read));
  const int closed = gzclose(file);
  if (num_read < 0 || closed != Z_OK)
    throw fulgur::UsageError(fmt::format("'{}' is not a whole gzip file", path.string()));
  return text;
}

// Returns the next number of `text`, and removes it and the separator after it from `text`.
float take_number(std::string_view& text, const std::filesystem::path& path) {
  float number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) throw fulgur::UsageError(fmt::format("'{}' is not the digits' CSV", path.string()));
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  const size_t next = std::min(text.find_first_of("0123456789"), text.size());
  text.remove_prefix(next);
  return number;
}

}  // namespace

fulgur::Batch read_digits(const std::filesystem::path& file) {
  const std::string text = read_gzip(file);
  std::string_view rest = text;
  std::vector<float> pixels;
  std::vector<int64_t> labels;
  while (!rest.empty()) {
    for (int64_t i = 0; i < kPixels; ++i) pixels.push_back(take_number(rest, file) / kMaxPixel);
    labels.push_back(static_cast<int64_t>(take_number(rest, file)));
  }
  const auto count = static_cast<int64_t>(labels.size());
  return {{"image", torch::tensor(pixels).view({count, 1, kSide, kSide})}, {"label", torch::tensor(labels)}};
}

fulgur::Batch read_digit_pictures(const std::filesystem::path& folder) {
  const auto pictures =
      fulgur::ImageDataset::from_folder(folder, {.size = kSide, .resize = kSide, .color = fulgur::ImageColor::gray});
  if (pictures->classes().size() != 10) {
    throw fulgur::UsageError(fmt::format("'{}' has {} folders; there must be one for each of the ten digits",
                                         folder.string(), pictures->classes().size()));
  }
  std::vector<fulgur::Random> unused(static_cast<size_t>(pictures->size()), fulgur::Random(0));
  return pictures->get_batch(torch::arange(pictures->size()), unused);
}

SplitDigits split_digits(const std::filesystem::path& file, uint64_t seed) {
  const fulgur::TensorDataset all(read_digits(file));
  if (all.size() <= kHeldOut) {
    throw fulgur::UsageError(fmt::format("'{}' has {} digits; {} are held out, and training needs more", file.string(),
                                         all.size(), kHeldOut));
  }
  const auto parts = fulgur::random_split(all, {all.size() - kHeldOut, kHeldOut}, seed);
  return {.train = parts[0], .held_out = parts[1]};
}

std::filesystem::path default_file() {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  return program + ".runfiles/digits/digits.csv.gz";
}

void DigitsDataOptions::describe(fulgur::FieldVisitor& visit) {
  visit({.name = "file", .help = "file of the digits: gzipped CSV"}, &file);
  visit({.name = "path", .help = "folder to read instead of the file: train/<digit>/*.png"}, &path);
  visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
}

DigitsData::DigitsData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {}

void DigitsData::setup(fulgur::EntryPoint) {
  if (!parts_.empty()) return;
  const fulgur::TensorDataset all(options_.path.empty() ? read_digits(options_.file)
                                                        : read_digit_pictures(options_.path / "train"));
  constexpr int64_t kVal = 180;
  if (all.size() < kVal + kHeldOut + options_.batch_size) {
    throw fulgur::UsageError(fmt::format("there are {} digits; {} are for validation and test, and training needs {}",
                                         all.size(), kVal + kHeldOut, options_.batch_size));
  }
  parts_ = fulgur::random_split(all, {all.size() - kVal - kHeldOut, kVal, kHeldOut}, seed_);
}

std::shared_ptr<fulgur::Loader> DigitsData::train_dataloader() {
  return fulgur::DataLoader::make(
      parts_[0], {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_, .drop_last = true});
}

fulgur::LoaderList DigitsData::val_dataloader() {
  return fulgur::DataLoader::make(parts_[1], {.batch_size = options_.batch_size});
}

fulgur::LoaderList DigitsData::test_dataloader() {
  return fulgur::DataLoader::make(parts_[2], {.batch_size = options_.batch_size});
}

}  // namespace digits
