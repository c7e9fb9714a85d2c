#include "fulgur/data/dataset.h"

#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace fulgur {

Batch Dataset::get_batch(const at::Tensor& indices) const {
  const int64_t* index = indices.const_data_ptr<int64_t>();
  std::vector<Batch> samples;
  for (int64_t i = 0; i < indices.numel(); ++i) samples.push_back(get(index[i]));
  TORCH_CHECK_VALUE(!samples.empty(), "a batch needs at least one sample");
  std::vector<Batch::Entry> entries;
  for (const auto& [name, first] : samples.front()) {
    std::vector<at::Tensor> tensors;
    for (const Batch& sample : samples) {
      TORCH_CHECK_VALUE(sample.contains(name) && sample.size() == samples.front().size(),
                        "samples of one batch differ in the names of their tensors: '", name,
                        "' is not in all of them");
      TORCH_CHECK_VALUE(sample[name].sizes() == first.sizes(), "samples of one batch differ in the shape of '", name,
                        "': ", first.sizes(), " and ", sample[name].sizes(), "; pad or crop them in get()");
      tensors.push_back(sample[name]);
    }
    entries.emplace_back(name, at::stack(tensors));
  }
  return Batch(std::move(entries));
}

}  // namespace fulgur
