#include "fulgur/data/images/webp.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <webp/decode.h>

#include "fulgur/data/images/gray.h"

namespace fulgur {
namespace {

using Bytes = std::span<const uint8_t>;

const char* reason_of(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_NOT_ENOUGH_DATA:
      return "the WebP file ends too early";
    case VP8_STATUS_BITSTREAM_ERROR:
      return "its WebP data is damaged";
    case VP8_STATUS_OUT_OF_MEMORY:
      return "there is not enough memory to decode it";
    default:
      return "libwebp cannot decode it";
  }
}

WebPBitstreamFeatures read_features(Bytes bytes, const std::string& name) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = ::WebPGetFeatures(bytes.data(), bytes.size(), &features);
  if (status != VP8_STATUS_OK) throw_image_error(name, reason_of(status));
  if (features.has_animation != 0) throw_image_error(name, "it is an animation; expected one picture");
  return features;
}

}  // namespace

ImageHeader read_webp_header(Bytes bytes, const std::string& name) {
  const WebPBitstreamFeatures features = read_features(bytes, name);
  return {.format = ImageFormat::webp, .height = features.height, .width = features.width};
}

at::Tensor decode_webp(Bytes bytes, const std::string& name, bool is_gray) {
  WebPDecoderConfig config;
  TORCH_INTERNAL_ASSERT(::WebPInitDecoderConfig(&config) != 0, "libwebp is of another version than its header");
  config.input = read_features(bytes, name);
  at::Tensor pixels = at::empty({config.input.height, config.input.width, 3}, at::kByte);
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA = {.rgba = pixels.mutable_data_ptr<uint8_t>(),
                          .stride = static_cast<int>(pixels.stride(0)),
                          .size = static_cast<size_t>(pixels.numel())};
  const VP8StatusCode status = ::WebPDecode(bytes.data(), bytes.size(), &config);
  ::WebPFreeDecBuffer(&config.output);
  if (status != VP8_STATUS_OK) throw_image_error(name, reason_of(status));
  return is_gray ? gray_of_rgb(pixels) : pixels;
}

}  // namespace fulgur
