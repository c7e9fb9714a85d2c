#include "fulgur/data/collate.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "fulgur/data/dataset.h"

namespace fulgur {
namespace {

at::Tensor padded(const at::Tensor& tensor, int64_t length, double value) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[0] = length;
  at::Tensor whole = at::full(shape, value, tensor.options());
  whole.narrow(0, 0, tensor.size(0)).copy_(tensor);
  return whole;
}

int64_t length_of(const Batch& sample, const std::string& name) {
  TORCH_CHECK_VALUE(sample.contains(name), "samples of one batch differ in the names of their tensors: '", name,
                    "' is not in all of them");
  TORCH_CHECK_VALUE(sample[name].dim() > 0, "samples of one batch differ in the dimensions of '", name,
                    "': it is a scalar in some, and has a length in the first");
  return sample[name].size(0);
}

}  // namespace

Collate pad_to_longest(std::vector<std::pair<std::string, double>> values) {
  return [values = std::move(values)](const std::vector<Batch>& samples) {
    for (const auto& [name, value] : values) {
      TORCH_CHECK_VALUE(samples.empty() || samples.front().contains(name), "pad_to_longest: a sample has no tensor '",
                        name, "' to pad");
    }
    std::vector<Batch> same_length(samples);
    for (const auto& [name, of_first] : samples.empty() ? Batch() : samples.front()) {
      if (of_first.dim() == 0) continue;
      TORCH_CHECK_VALUE(!samples.front().contains(name + "_mask"), "pad_to_longest makes a mask of '", name,
                        "' under the name '", name, "_mask', which a sample already has; give that another name");
      int64_t longest = 0;
      for (const Batch& sample : samples) longest = std::max(longest, length_of(sample, name));
      const auto value = std::ranges::find(values, name, &std::pair<std::string, double>::first);
      for (Batch& sample : same_length) {
        const at::Tensor mask = at::arange(longest, at::kLong).lt(sample[name].size(0));
        const at::Tensor whole = padded(sample[name], longest, value == values.end() ? 0.0 : value->second);
        sample = sample.with(name, whole).with(name + "_mask", mask);
      }
    }
    return stack_samples(same_length);
  };
}

}  // namespace fulgur
