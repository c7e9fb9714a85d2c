#include "fulgur/data/images/image_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace fulgur {
namespace {

namespace fs = std::filesystem;

bool is_hidden(const fs::path& path) { return path.filename().native().starts_with('.'); }

bool has_ending_of_picture(const fs::path& path) {
  constexpr std::array<std::string_view, 4> kEndings{".png", ".jpg", ".jpeg", ".webp"};
  std::string ending = path.extension().string();
  std::ranges::transform(ending, ending.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return std::ranges::find(kEndings, ending) != kEndings.end();
}

// What `keep` accepts of a folder's entries, sorted.
template <class Predicate>
std::vector<fs::path> entries_of(const fs::path& folder, const Predicate& keep) {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (!is_hidden(entry.path()) && keep(entry)) paths.push_back(entry.path());
  }
  std::ranges::sort(paths);
  return paths;
}

std::vector<fs::path> class_folders_of(const fs::path& root) {
  if (!fs::is_directory(root)) {
    throw std::runtime_error(fmt::format("there is no folder of pictures '{}'", root.string()));
  }
  auto folders = entries_of(root, [](const fs::directory_entry& entry) { return entry.is_directory(); });
  if (folders.empty()) {
    throw std::runtime_error(
        fmt::format("'{}' has no folder for any class; pictures are expected as {}/<class>/<picture>", root.string(),
                    root.string()));
  }
  return folders;
}

std::vector<fs::path> pictures_of(const fs::path& folder) {
  auto pictures = entries_of(folder, [](const fs::directory_entry& entry) {
    return has_ending_of_picture(entry.path()) && !entry.is_directory();
  });
  if (pictures.empty()) {
    throw std::runtime_error(fmt::format(
        "the class folder '{}' has no picture, which would end in .png, .jpg, .jpeg or .webp; add some or remove it",
        folder.string()));
  }
  return pictures;
}

LabelledImage parse_line(std::string_view line, const fs::path& list, int64_t number) {
  const auto fail = [&](const std::string& what) {
    throw std::runtime_error(fmt::format("'{}', line {}: {}; a line is <file>,<label>, such as cats/tom.jpg,3",
                                         list.string(), number, what));
  };
  const size_t comma = line.rfind(',');
  if (comma == std::string_view::npos) fail(fmt::format("'{}' has no comma", line));
  if (comma == 0) fail("the file has no name");
  std::string_view text = line.substr(comma + 1);
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  int64_t label = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), label);
  if (error != std::errc{} || end != text.data() + text.size() || label < 0) {
    fail(fmt::format("the label '{}' is not a whole number from 0 on", text));
  }
  return {list.parent_path() / line.substr(0, comma), label};
}

std::string digest_of(const std::vector<LabelledImage>& images) {
  std::string text;
  for (const LabelledImage& image : images) {
    // The class folder and the name: a data set may lie elsewhere on another machine.
    text += fmt::format("{}/{}\n{}\n", image.file.parent_path().filename().string(), image.file.filename().string(),
                        image.label);
  }
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

}  // namespace

std::shared_ptr<ImageDataset> ImageDataset::from_folder(const fs::path& root, ImageOptions options) {
  std::vector<LabelledImage> images;
  std::vector<std::string> classes;
  for (const fs::path& folder : class_folders_of(root)) {
    const auto label = static_cast<int64_t>(classes.size());
    for (fs::path& file : pictures_of(folder)) images.push_back({std::move(file), label});
    classes.push_back(folder.filename().string());
  }
  auto dataset = std::make_shared<ImageDataset>(std::move(images), std::move(options));
  dataset->classes_ = std::move(classes);
  return dataset;
}

std::shared_ptr<ImageDataset> ImageDataset::from_list(const fs::path& list, ImageOptions options) {
  std::ifstream file(list);
  if (!file) throw std::runtime_error(fmt::format("cannot read the list of pictures '{}'", list.string()));
  std::vector<LabelledImage> images;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (number == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // the mark of UTF-8 that Excel writes
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (!line.empty()) images.push_back(parse_line(line, list, number));
  }
  if (images.empty()) throw std::runtime_error(fmt::format("the list of pictures '{}' is empty", list.string()));
  return std::make_shared<ImageDataset>(std::move(images), std::move(options));
}

ImageDataset::ImageDataset(std::vector<LabelledImage> images, ImageOptions options)
    : images_(std::move(images)), options_(std::move(options)), digest_(digest_of(images_)) {
  check_image_options(options_);
}

std::string ImageDataset::sample_options() const {
  ImageOptions options = options_;
  options.max_pixels = ImageOptions().max_pixels;
  return fmt::format("ImageOptions({})", changed_fields(std::move(options)));
}

Batch ImageDataset::get(int64_t index, Random& random) const {
  const LabelledImage& image = images_.at(static_cast<size_t>(index));
  at::Tensor pixels = at::empty({num_channels(options_), options_.size, options_.size}, at::kFloat);
  read_image_into(pixels, image.file, options_, random);
  return {{"image", pixels}, {"label", at::scalar_tensor(image.label, at::kLong)}};
}

// Each picture is written to its place in the batch, which saves copying it there.
Batch ImageDataset::get_batch(const at::Tensor& indices, std::span<Random> random) const {
  TORCH_INTERNAL_ASSERT(std::ssize(random) == indices.numel());
  const auto index = indices.contiguous();
  at::Tensor images = at::empty({index.numel(), num_channels(options_), options_.size, options_.size}, at::kFloat);
  at::Tensor labels = at::empty({index.numel()}, at::kLong);
  for (int64_t i = 0; i < index.numel(); ++i) {
    const LabelledImage& image = images_.at(static_cast<size_t>(index.const_data_ptr<int64_t>()[i]));
    read_image_into(images[i], image.file, options_, random[static_cast<size_t>(i)]);
    labels.mutable_data_ptr<int64_t>()[i] = image.label;
  }
  return {{"image", images}, {"label", labels}};
}

}  // namespace fulgur
