#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace fulgur::metrics {

// Which samples of a batch count: bool [N], N being dim 0 of the batch; nullopt is all. A sampler that gives each rank
// equally many samples repeats some to fill up: where its mask is false they are not counted, so that the value over
// all ranks is that of the data set, whatever world_size is.
using Valid = std::optional<at::Tensor>;

namespace internal {

// Throws c10::ValueError, with both shapes, if they differ.
void check_same_shape(std::string_view metric, const at::Tensor& preds, const at::Tensor& target);

// `valid` as a bool tensor of the shape of `like`, whose dim 0 it masks. Throws c10::ValueError if it does not fit.
at::Tensor counted(std::string_view metric, const Valid& valid, const at::Tensor& like);

// 0-dim float64: the sum of those values that count.
at::Tensor sum_where(const at::Tensor& counted, const at::Tensor& values);

}  // namespace internal
}  // namespace fulgur::metrics
