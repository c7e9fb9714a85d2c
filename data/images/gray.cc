#include "fulgur/data/images/gray.h"

#include <ATen/ops/empty.h>

#include <cstdint>

namespace fulgur {

at::Tensor gray_of_rgb(const at::Tensor& rgb) {
  at::Tensor gray = at::empty({rgb.size(0), rgb.size(1), 1}, at::kByte);
  const uint8_t* color = rgb.const_data_ptr<uint8_t>();
  uint8_t* level = gray.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < gray.numel(); ++i, color += 3) {
    level[i] = static_cast<uint8_t>((color[0] * 19595 + color[1] * 38470 + color[2] * 7471 + (1 << 15)) >> 16);
  }
  return gray;
}

}  // namespace fulgur
