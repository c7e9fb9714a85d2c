#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace fulgur::metrics {

// Which samples of a batch count: bool [N], where N is dim 0 of the batch; nullopt: all. A sampler that gives every
// rank the same number of samples repeats some to fill up; the mask is false for repeated samples, so that the value
// over all ranks is that of the data set, whatever world_size is.
using Valid = std::optional<at::Tensor>;

namespace internal {

// Throws c10::ValueError, with both shapes, if they differ.
void check_same_shape(std::string_view metric, const at::Tensor& preds, const at::Tensor& target);

// `valid` as a bool tensor of the shape of `like`, whose dim 0 it masks. Throws c10::ValueError if the sizes do not
// match.
at::Tensor counted(std::string_view metric, const Valid& valid, const at::Tensor& like);

// The sum of the values that count, as 0-dim float64.
at::Tensor sum_where(const at::Tensor& counted, const at::Tensor& values);

}  // namespace internal
}  // namespace fulgur::metrics
