#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fulgur/base/state.h"

namespace fulgur {

// How the elements of a tensor are distributed. Elements that are NaN or infinite are left out.
struct Histogram {
  int64_t count = 0;
  double min = 0.0, max = 0.0, sum = 0.0, sum_of_squares = 0.0;
  std::vector<double> limits{};   // ascending; bucket i has the values from limits[i - 1] (inclusive) to limits[i]
  std::vector<int64_t> counts{};  // by bucket, from the first to the last one that is not empty
};

// A text, which TensorBoard shows as Markdown.
struct Text {
  std::string text;
};

// A picture, as Module::log_image() hands it to the loggers.
struct Image {
  at::Tensor pixels;  // uint8 [channels, height, width], contiguous, on the CPU; 1 (grey), 3 (RGB) or 4 (RGBA) channels
};

// The settings of a run, which a logger shows with its metrics.
struct HyperParameters {
  State values;
};

// What a run logs besides metrics.
struct Record {
  std::string name;  // empty for hyper-parameters
  std::variant<Histogram, Text, Image, HyperParameters> content;
};

// The limits grow by a tenth from 1e-12 on, on both sides of 0, as TensorFlow's do. Throws c10::ValueError for a tensor
// that is undefined or complex.
Histogram histogram_of(const at::Tensor& values);

// Takes [height, width] or [channels, height, width] with 1, 3 or 4 channels: uint8, or floating point from 0 to 1
// (what is outside is cut off). Throws c10::ValueError, with the shape and type it got, for anything else.
Image image_of(std::string_view name, const at::Tensor& pixels);

}  // namespace fulgur
