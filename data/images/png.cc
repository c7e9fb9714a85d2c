#include "fulgur/data/images/png.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <vector>

#include "fulgur/data/images/gray.h"

namespace fulgur {
namespace {

using Bytes = std::span<const uint8_t>;

// Reads one picture. When libpng fails, it leaves through longjmp, which skips destructors: so the functions that call
// setjmp hold no object that needs a destructor, and return false on failure.
class PngReader {
 public:
  explicit PngReader(Bytes bytes)
      : rest_(bytes),
        png_(::png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, [](png_structp, png_const_charp) {})),
        info_(png_ == nullptr ? nullptr : ::png_create_info_struct(png_)) {}
  ~PngReader() { ::png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  bool read_header(bool asks_gray) {
    if (info_ == nullptr) return false;
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    ::png_set_read_fn(png_, this, on_read);
    ::png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);  // texts, profiles, times
    ::png_read_info(png_, info_);
    const bool has_color = (::png_get_color_type(png_, info_) & PNG_COLOR_MASK_COLOR) != 0;
    ::png_set_expand(png_);  // palettes to colours, fewer than 8 bits to 8
    ::png_set_strip_16(png_);
    ::png_set_strip_alpha(png_);
    if (!has_color && !asks_gray) ::png_set_gray_to_rgb(png_);
    ::png_set_interlace_handling(png_);
    ::png_read_update_info(png_, info_);
    return true;
  }

  bool read_rows(png_bytepp rows) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    ::png_read_image(png_, rows);
    return true;
  }

  int64_t height() const { return ::png_get_image_height(png_, info_); }
  int64_t width() const { return ::png_get_image_width(png_, info_); }
  int64_t num_channels() const { return ::png_get_channels(png_, info_); }
  const char* error() const { return error_.data(); }

 private:
  static void on_error(png_structp png, png_const_charp message) {
    auto& reader = *static_cast<PngReader*>(::png_get_error_ptr(png));
    std::snprintf(reader.error_.data(), reader.error_.size(), "%s", message);
    ::png_longjmp(png, 1);
  }

  static void on_read(png_structp png, png_bytep to, size_t num_bytes) {
    Bytes& rest = static_cast<PngReader*>(::png_get_io_ptr(png))->rest_;
    if (num_bytes > rest.size()) ::png_error(png, "the file ends too early");
    std::memcpy(to, rest.data(), num_bytes);
    rest = rest.subspan(num_bytes);
  }

  Bytes rest_;
  std::array<char, 128> error_{"out of memory"};
  png_structp png_;
  png_infop info_;
};

}  // namespace

ImageHeader read_png_header(Bytes bytes, const std::string& name) {
  constexpr std::array<uint8_t, 4> kType{'I', 'H', 'D', 'R'};
  constexpr size_t kTypeAt = 12, kWidthAt = 16, kHeightAt = 20, kEnd = 24;
  if (bytes.size() < kEnd || !std::ranges::equal(bytes.subspan(kTypeAt, kType.size()), kType)) {
    throw_image_error(name, "the PNG file does not begin with its size (IHDR)");
  }
  return {.format = ImageFormat::png,
          .height = png_get_uint_32(bytes.data() + kHeightAt),
          .width = png_get_uint_32(bytes.data() + kWidthAt)};
}

at::Tensor decode_png(Bytes bytes, const std::string& name, bool is_gray) {
  PngReader reader(bytes);
  if (!reader.read_header(is_gray)) throw_image_error(name, fmt::format("libpng says '{}'", reader.error()));
  at::Tensor pixels = at::empty({reader.height(), reader.width(), reader.num_channels()}, at::kByte);
  std::vector<png_bytep> rows;
  for (int64_t y = 0; y < pixels.size(0); ++y)
    rows.push_back(pixels.mutable_data_ptr<uint8_t>() + y * pixels.stride(0));
  if (!reader.read_rows(rows.data())) throw_image_error(name, fmt::format("libpng says '{}'", reader.error()));
  return is_gray && pixels.size(2) == 3 ? gray_of_rgb(pixels) : pixels;
}

}  // namespace fulgur
