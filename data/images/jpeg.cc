#include "fulgur/data/images/jpeg.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

#include "fulgur/data/images/exif.h"
#include "fulgur/data/images/gray.h"

namespace fulgur {
namespace {

using Bytes = std::span<const uint8_t>;

constexpr uint8_t kEndOfImage = 0xd9, kStartOfScan = 0xda;

bool has_no_length(uint8_t marker) { return marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8); }

// Frames that begin with one of these markers have arithmetic coding; 0xcc defines its conditions.
bool begins_arithmetic_frame(uint8_t marker) { return marker >= 0xc9 && marker <= 0xcf && marker != 0xcc; }

// The position of the next marker from `position` on, after bytes that only fill up; the file's size if there is none.
size_t find_marker(Bytes jpeg, size_t position) {
  for (; position + 1 < jpeg.size(); ++position) {
    if (jpeg[position] == 0xff && jpeg[position + 1] != 0xff && jpeg[position + 1] != 0) return position;
  }
  return jpeg.size();
}

size_t end_of_segment(Bytes jpeg, size_t marker) {
  if (has_no_length(jpeg[marker + 1])) return marker + 2;
  if (jpeg.size() - marker < 4) return jpeg.size();
  const size_t length = static_cast<size_t>(jpeg[marker + 2]) << 8 | jpeg[marker + 3];  // counts its own two bytes
  return std::min(marker + 2 + std::max<size_t>(length, 2), jpeg.size());
}

// A file as libjpeg gets it: without the stray bytes that some cameras leave between two segments before the first
// scan. libjpeg would skip these bytes with a warning, which hides all later warnings. Without them every warning means
// damage.
class JpegFile {
 public:
  explicit JpegFile(Bytes stored) : bytes_(stored) {
    const auto begin = stored.begin();
    size_t position = std::min<size_t>(2, stored.size());  // after the marker that begins the file
    size_t num_taken = 0;
    while (true) {
      const size_t marker = find_marker(stored, position);
      if (marker == stored.size()) break;
      if (marker > position) {
        kept_.insert(kept_.end(), begin + static_cast<ptrdiff_t>(num_taken), begin + static_cast<ptrdiff_t>(position));
        num_taken = marker;
      }
      has_arithmetic_coding_ |= begins_arithmetic_frame(stored[marker + 1]);
      if (stored[marker + 1] == kStartOfScan || stored[marker + 1] == kEndOfImage) break;
      position = end_of_segment(stored, marker);
    }
    if (num_taken == 0) return;
    kept_.insert(kept_.end(), begin + static_cast<ptrdiff_t>(num_taken), stored.end());
    bytes_ = kept_;
  }
  JpegFile(const JpegFile&) = delete;
  JpegFile& operator=(const JpegFile&) = delete;

  Bytes bytes() const { return bytes_; }
  bool has_arithmetic_coding() const { return has_arithmetic_coding_; }

 private:
  Bytes bytes_;
  std::vector<uint8_t> kept_{};  // empty if the stored bytes are those of bytes_
  bool has_arithmetic_coding_ = false;
};

// Making a handle takes 0.2 us, a thousandth of the time of decoding or less: handles are not reused.
struct CloseHandle {
  void operator()(void* handle) const { ::tjDestroy(handle); }
};
using Handle = std::unique_ptr<std::remove_pointer_t<tjhandle>, CloseHandle>;

// A progressive file may repeat its scans without an end.
constexpr int kFlags = TJFLAG_LIMITSCANS;

// libjpeg goes on after a warning and fills what is missing with grey.
[[noreturn]] void fail(const Handle& handle, const std::string& name) {
  throw_image_error(name, fmt::format("libjpeg says '{}'", ::tjGetErrorStr2(handle.get())));
}

struct JpegHeader {
  int width = 0, height = 0, subsampling = 0, colorspace = 0;
};

JpegHeader read_header(const Handle& handle, Bytes bytes, const std::string& name) {
  JpegHeader header;
  const int status = ::tjDecompressHeader3(handle.get(), bytes.data(), bytes.size(), &header.width, &header.height,
                                           &header.subsampling, &header.colorspace);
  // A subsampling that TurboJPEG has no name for can be decoded all the same. If this status hides a warning, decoding
  // gives the warning again.
  const bool lacks_only_name =
      header.subsampling < 0 && header.width >= 1 && header.height >= 1 && header.colorspace >= 0;
  if (status != 0 && !lacks_only_name) fail(handle, name);
  if (header.width < 1 || header.height < 1) throw_image_error(name, "the JPEG file ends before its picture");
  return header;
}

// The inks of a CMYK file are stored inverted, as Adobe's programs do and every reader expects.
at::Tensor rgb_of_inverted_cmyk(const at::Tensor& cmyk) {
  at::Tensor rgb = at::empty({cmyk.size(0), cmyk.size(1), 3}, at::kByte);
  const uint8_t* ink = cmyk.const_data_ptr<uint8_t>();
  uint8_t* color = rgb.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < rgb.numel(); i += 3, ink += 4) {
    for (int64_t c = 0; c < 3; ++c) color[i + c] = static_cast<uint8_t>((ink[c] * ink[3] + 127) / 255);
  }
  return rgb;
}

}  // namespace

ImageHeader read_jpeg_header(Bytes bytes, const std::string& name) {
  const JpegFile file(bytes);
  const JpegHeader header = read_header(Handle(::tjInitDecompress()), file.bytes(), name);
  const int orientation = exif_orientation(file.bytes());
  const bool lies = orientation >= 5;
  return {.format = ImageFormat::jpeg,
          .height = lies ? header.width : header.height,
          .width = lies ? header.height : header.width,
          .orientation = orientation,
          .has_arithmetic_coding = file.has_arithmetic_coding()};
}

at::Tensor decode_jpeg(Bytes bytes, const std::string& name, bool is_gray, int64_t shrink) {
  const JpegFile file(bytes);
  const Handle handle(::tjInitDecompress());
  const JpegHeader header = read_header(handle, file.bytes(), name);
  const bool is_cmyk = header.colorspace == TJCS_CMYK || header.colorspace == TJCS_YCCK;
  const int format = is_cmyk ? TJPF_CMYK : is_gray ? TJPF_GRAY : TJPF_RGB;
  const tjscalingfactor factor{1, static_cast<int>(shrink)};
  const int width = TJSCALED(header.width, factor), height = TJSCALED(header.height, factor);
  at::Tensor pixels = at::empty({height, width, tjPixelSize[format]}, at::kByte);
  if (::tjDecompress2(handle.get(), file.bytes().data(), file.bytes().size(), pixels.mutable_data_ptr<uint8_t>(), width,
                      0, height, format, kFlags) != 0) {
    fail(handle, name);
  }
  if (!is_cmyk) return pixels;
  const at::Tensor rgb = rgb_of_inverted_cmyk(pixels);
  return is_gray ? gray_of_rgb(rgb) : rgb;
}

}  // namespace fulgur
