#include "fulgur/data/images/decode_image.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "fulgur/data/images/jpeg.h"
#include "fulgur/data/images/png.h"
#include "fulgur/data/images/webp.h"

namespace fulgur {
namespace {

using Bytes = std::span<const uint8_t>;

// Huffman codes have at least one bit for each block of 8 x 8 samples, and there is a block for at most 128 pixels: two
// components of 4 x 1 and 1 x 4 samples have 8 for 32 x 32 pixels. Deflate makes at most 1,032 bytes of one, and a byte
// has at most 8 pixels. Arithmetic coding and lossless WebP need no byte at all for more pixels of one colour.
constexpr int64_t kHuffmanPixelsPerByte = 128 * 8, kPngPixelsPerByte = 1032 * 8;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

bool has_at(Bytes bytes, size_t position, std::string_view text) {
  if (bytes.size() < position + text.size()) return false;
  return std::ranges::equal(bytes.subspan(position, text.size()), text,
                            [](uint8_t byte, char letter) { return byte == static_cast<uint8_t>(letter); });
}

void check_size(const ImageHeader& header, const std::string& name, int64_t max_pixels, int64_t num_bytes,
                int64_t pixels_per_byte) {
  if (header.width < 1 || header.height < 1) {
    throw_image_error(name, fmt::format("it claims {} x {} pixels", header.width, header.height));
  }
  // Neither side has more than 32 bits, so the product fits.
  const auto num_pixels = static_cast<uint64_t>(header.width) * static_cast<uint64_t>(header.height);
  if (num_pixels > static_cast<uint64_t>(max_pixels)) {
    throw_image_error(name, fmt::format("it has {} x {} pixels, more than max_pixels, which is {}", header.width,
                                        header.height, max_pixels));
  }
  if (num_pixels / static_cast<uint64_t>(pixels_per_byte) > static_cast<uint64_t>(num_bytes)) {
    throw_image_error(name, fmt::format("it claims {} x {} pixels, which its {} bytes cannot hold", header.width,
                                        header.height, num_bytes));
  }
}

at::Tensor decode(Bytes bytes, const std::string& name, ImageFormat format, const DecodeOptions& options) {
  const bool is_gray = options.color == ImageColor::gray;
  switch (format) {
    case ImageFormat::jpeg:
      return decode_jpeg(bytes, name, is_gray, options.shrink);
    case ImageFormat::png:
      return decode_png(bytes, name, is_gray);
    case ImageFormat::webp:
      return decode_webp(bytes, name, is_gray);
  }
  TORCH_INTERNAL_ASSERT(false, "a format without a decoder");
}

// Turns [C, H, W] upright. Orientations 5 to 8 exchange the sides, and then do the same as 1 to 4.
at::Tensor turn_upright(const at::Tensor& image, int orientation) {
  switch (orientation) {
    case 2:
      return image.flip(2);
    case 3:
      return image.flip({1, 2});
    case 4:
      return image.flip(1);
    case 5:
      return image.transpose(1, 2);
    case 6:
      return image.transpose(1, 2).flip(2);
    case 7:
      return image.transpose(1, 2).flip({1, 2});
    case 8:
      return image.transpose(1, 2).flip(1);
    default:
      return image;
  }
}

}  // namespace

ImageHeader read_image_header(Bytes bytes, const std::string& name, int64_t max_pixels) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  ImageHeader header;
  if (has_at(bytes, 0, "\xff\xd8\xff")) {
    header = read_jpeg_header(bytes, name);
    check_size(header, name, max_pixels, num_bytes, header.has_arithmetic_coding ? kUnlimited : kHuffmanPixelsPerByte);
  } else if (has_at(bytes, 0, "\x89PNG\r\n\x1a\n")) {
    header = read_png_header(bytes, name);
    check_size(header, name, max_pixels, num_bytes, kPngPixelsPerByte);
  } else if (has_at(bytes, 0, "RIFF") && has_at(bytes, 8, "WEBP")) {
    header = read_webp_header(bytes, name);
    check_size(header, name, max_pixels, num_bytes, kUnlimited);
  } else if (bytes.empty()) {
    throw_image_error(name, "the file is empty");
  } else {
    throw_image_error(name, fmt::format("it is no JPEG, PNG or WebP file: it begins with the bytes {:02x}",
                                        fmt::join(bytes.first(std::min<size_t>(bytes.size(), 8)), " ")));
  }
  return header;
}

at::Tensor decode_image(Bytes bytes, const std::string& name, const DecodeOptions& options) {
  const ImageHeader header = read_image_header(bytes, name, options.max_pixels);
  const at::Tensor stored = decode(bytes, name, header.format, options).permute({2, 0, 1});
  const at::Tensor upright = turn_upright(stored, header.orientation);
  return upright.permute({1, 2, 0}).contiguous().permute({2, 0, 1});
}

}  // namespace fulgur
