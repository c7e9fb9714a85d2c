#include "fulgur/data/images/image_pipeline.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/data/images/image_transforms.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

std::vector<uint8_t> read_bytes(const fs::path& path) {
  std::error_code error;
  const uintmax_t num_bytes = fs::file_size(path, error);
  if (error) throw_image_error(path.string(), error.message());
  const std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
  if (file == nullptr) throw_image_error(path.string(), std::strerror(errno));
  std::vector<uint8_t> bytes(num_bytes);
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file.get()));  // fewer if it has just been cut
  return bytes;
}

// How much smaller a JPEG may be decoded so that `height` x `width` of its pixels are still as many as are asked for.
int64_t largest_shrink(int64_t height, int64_t width, int64_t asked_height, int64_t asked_width) {
  int64_t shrink = 8;
  while (shrink > 1 && (height < asked_height * shrink || width < asked_width * shrink)) shrink /= 2;
  return shrink;
}

// The same part of an image whose sides were divided by `shrink` and rounded up.
Crop shrunk(const Crop& crop, int64_t shrink) {
  const auto nearest = [shrink](int64_t edge) { return (edge + shrink / 2) / shrink; };
  const int64_t top = nearest(crop.top), left = nearest(crop.left);
  return {top, left, nearest(crop.top + crop.height) - top, nearest(crop.left + crop.width) - left};
}

class Pipeline {
 public:
  Pipeline(const fs::path& file, const ImageOptions& options)
      : name_(file.string()),
        bytes_(read_bytes(file)),
        header_(read_image_header(bytes_, name_, options.max_pixels)),
        options_(options) {}

  at::Tensor for_training(Random& random) const {
    const Crop crop = random_resized_crop(header_.height, header_.width, options_.scale, options_.ratio, random);
    const int64_t shrink = shrink_for(crop.height, crop.width, options_.size, options_.size);
    const at::Tensor part = crop_of(decode(shrink), shrunk(crop, shrink));
    const at::Tensor image = resize_image(part, options_.size, options_.size);
    return random.chance(options_.flip) ? image.flip(2) : image;
  }

  at::Tensor for_evaluation() const {
    const int64_t shorter = options_.resize.value_or(std::llround(static_cast<double>(options_.size) / 0.875));
    const auto [height, width] = size_with_shorter_side(header_.height, header_.width, shorter);
    check_resized(height, width, shorter);
    const int64_t shrink = shrink_for(header_.height, header_.width, height, width);
    return crop_of(resize_image(decode(shrink), height, width), center_crop(height, width, options_.size));
  }

 private:
  // A narrow picture becomes much larger when its shorter side does.
  void check_resized(int64_t height, int64_t width, int64_t shorter) const {
    if (width <= options_.max_pixels / height) return;
    throw_image_error(name_, fmt::format("it has {} x {} pixels; with a shorter side of {} it would have {} x {}, more "
                                         "than max_pixels, which is {}",
                                         header_.width, header_.height, shorter, width, height, options_.max_pixels));
  }

  int64_t shrink_for(int64_t height, int64_t width, int64_t asked_height, int64_t asked_width) const {
    const bool can_shrink = options_.allows_scaled_decoding && header_.format == ImageFormat::jpeg;
    return can_shrink ? largest_shrink(height, width, asked_height, asked_width) : 1;
  }

  at::Tensor decode(int64_t shrink) const {
    return decode_image(bytes_, name_, {.color = options_.color, .shrink = shrink, .max_pixels = options_.max_pixels});
  }

  std::string name_;
  std::vector<uint8_t> bytes_;
  ImageHeader header_;
  const ImageOptions& options_;
};

void check_range(std::string_view name, std::pair<double, double> range) {
  if (range.first <= range.second) return;
  throw UsageError(
      fmt::format("images: {} is a range, lower end first; got {} to {}", name, range.first, range.second));
}

void check_num_values(std::string_view name, const std::vector<double>& values, int64_t expected) {
  if (values.empty() || static_cast<int64_t>(values.size()) == expected) return;
  throw UsageError(fmt::format("images: {} has a value for each of the {} channels, or none; got {} values", name,
                               expected, values.size()));
}

}  // namespace

void ImageOptions::describe(FieldVisitor& visit) {
  visit({.name = "size", .help = "side of the square that a picture becomes", .unit = "pixels", .min = 1}, &size);
  visit({.name = "augment", .help = "training: draw a random crop and whether it is mirrored"}, &augment);
  visit({.name = "resize",
         .help = "evaluation: length of the shorter side before the middle is cut out; none: size / 0.875",
         .unit = "pixels",
         .min = 1},
        &resize);
  visit({.name = "scale", .help = "training: range of the crop's share of the area", .min = 0, .max = 1}, &scale);
  visit({.name = "ratio", .help = "training: range of the crop's width over its height", .min = 1e-3}, &ratio);
  visit({.name = "flip", .help = "training: probability that a picture is mirrored", .min = 0, .max = 1}, &flip);
  visit({.name = "color", .help = "channels: three or one", .choices = {"rgb", "gray"}}, &color);
  visit({.name = "mean", .help = "mean of each channel, of values in 0..1; it is subtracted"}, &mean);
  visit({.name = "std", .help = "standard deviation of each channel; values are divided by it", .min = 1e-6}, &std);
  visit({.name = "allows_scaled_decoding",
         .help = "decode a JPEG at 1/2, 1/4 or 1/8 of its size if that is still as large as asked for"},
        &allows_scaled_decoding);
  visit({.name = "max_pixels",
         .help = "a picture that has more pixels, or would have after the resize of evaluation, is refused",
         .min = 1},
        &max_pixels);
}

void check_image_options(const ImageOptions& options) {
  check_fields("images", options);
  check_range("scale", options.scale);
  check_range("ratio", options.ratio);
  check_num_values("mean", options.mean, num_channels(options));
  check_num_values("std", options.std, num_channels(options));
  if (options.resize.value_or(options.size) < options.size) {
    throw UsageError(fmt::format("images: resize ({}) must be at least size ({}), which is cut out of it",
                                 *options.resize, options.size));
  }
}

int64_t num_channels(const ImageOptions& options) { return options.color == ImageColor::gray ? 1 : 3; }

void read_image_into(const at::Tensor& out, const fs::path& file, const ImageOptions& options, Random& random) {
  const Pipeline pipeline(file, options);
  normalize_into(out, options.augment ? pipeline.for_training(random) : pipeline.for_evaluation(), options.mean,
                 options.std);
}

}  // namespace fulgur
