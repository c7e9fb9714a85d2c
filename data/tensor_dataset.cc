#include "fulgur/data/tensor_dataset.h"

#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "fulgur/data/sampler.h"

namespace fulgur {
namespace {

// index_select, which has no kernel for tensors of one dimension and these unsigned types.
at::Tensor select(const at::Tensor& tensor, const at::Tensor& indices) {
  const auto as = [&](at::ScalarType of_equal_width) {
    return tensor.view(of_equal_width).index_select(0, indices).view(tensor.scalar_type());
  };
  switch (tensor.scalar_type()) {
    case at::kUInt16:
      return as(at::kShort);
    case at::kUInt32:
      return as(at::kInt);
    case at::kUInt64:
      return as(at::kLong);
    default:
      return tensor.index_select(0, indices);
  }
}

}  // namespace

TensorDataset::TensorDataset(Batch samples, std::string digest)
    : samples_(std::move(samples)), digest_(std::move(digest)), size_(samples_.batch_size()) {
  for (const auto& [name, tensor] : samples_) {
    TORCH_CHECK_VALUE(tensor.dim() > 0, "the tensor '", name,
                      "' of a TensorDataset has no dimension to count samples by");
  }
}

std::shared_ptr<TensorDataset> TensorDataset::make(Batch samples, std::string digest) {
  return std::make_shared<TensorDataset>(std::move(samples), std::move(digest));
}

Batch TensorDataset::get(int64_t index) const {
  std::vector<Batch::Entry> entries;
  for (const auto& [name, tensor] : samples_) entries.emplace_back(name, tensor.select(0, index));
  return Batch(std::move(entries));
}

Batch TensorDataset::get_batch(const at::Tensor& indices, std::span<Random>) const {
  std::vector<Batch::Entry> entries;
  for (const auto& [name, tensor] : samples_) entries.emplace_back(name, select(tensor, indices));
  return Batch(std::move(entries));
}

std::vector<std::shared_ptr<TensorDataset>> random_split(const TensorDataset& dataset,
                                                         const std::vector<int64_t>& sizes, uint64_t seed) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  TORCH_CHECK_VALUE(total == dataset.size(), "random_split: the sizes add up to ", total, ", but the dataset has ",
                    dataset.size(), " samples");
  const at::Tensor order = RandomSampler(dataset.size(), seed).indices(0);
  std::vector<std::shared_ptr<TensorDataset>> parts;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    parts.push_back(TensorDataset::make(dataset.get_batch(order.narrow(0, start, size))));
    start += size;
  }
  return parts;
}

}  // namespace fulgur
