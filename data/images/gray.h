#pragma once

#include <ATen/core/Tensor.h>

namespace fulgur {

// The luminance of uint8 [height, width, 3], as [height, width, 1]: 0.299 red + 0.587 green + 0.114 blue, rounded.
// Source: ITU-R BT.601, in the fixed point of Pillow's convert("L"), so that every level is the same.
at::Tensor gray_of_rgb(const at::Tensor& rgb);

}  // namespace fulgur
