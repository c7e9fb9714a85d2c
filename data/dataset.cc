#include "fulgur/data/dataset.h"

#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <exception>
#include <typeinfo>
#include <utility>

#include "fulgur/base/exception_text.h"
#include "fulgur/base/type_name.h"

namespace fulgur {

Batch get_sample(const Dataset& dataset, int64_t index, Random& random) {
  try {
    return dataset.get(index, random);
  } catch (...) {
    note_detail(std::current_exception(), fmt::format("sample {} of {}", index, dataset.name()));
    throw;
  }
}

Batch Dataset::get_batch(const at::Tensor& indices, std::span<Random> random) const {
  TORCH_INTERNAL_ASSERT(std::ssize(random) == indices.numel());
  const int64_t* index = indices.const_data_ptr<int64_t>();
  std::vector<Batch> samples;
  samples.reserve(random.size());
  for (Random& of_sample : random) samples.push_back(get_sample(*this, *index++, of_sample));
  return stack_samples(samples);
}

std::string Dataset::name() const { return short_type_name(typeid(*this)); }

Batch stack_samples(const std::vector<Batch>& samples) {
  TORCH_CHECK_VALUE(!samples.empty(), "a batch needs at least one sample");
  const Batch& first = samples.front();
  std::vector<Batch::Entry> entries;
  for (const auto& [name, of_first] : first) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(samples.size());
    for (const Batch& sample : samples) {
      TORCH_CHECK_VALUE(sample.contains(name) && sample.size() == first.size(),
                        "samples of one batch differ in the names of their tensors: '", name,
                        "' is not in all of them");
      TORCH_CHECK_VALUE(sample[name].sizes() == of_first.sizes(), "samples of one batch differ in the shape of '", name,
                        "': ", of_first.sizes(), " and ", sample[name].sizes(),
                        "; pad or crop them in get(), or give the DataLoader a collate such as pad_to_longest");
      tensors.push_back(sample[name]);
    }
    entries.emplace_back(name, at::stack(tensors));
  }
  return Batch(std::move(entries));
}

}  // namespace fulgur
