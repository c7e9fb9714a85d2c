#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fulgur/data/dataset.h"

namespace fulgur {

// Tensors that are in memory, dim 0 counting samples. A batch is one index_select per tensor.
//   auto dataset = TensorDataset::make({{"image", images}, {"label", labels}});
class TensorDataset final : public Dataset {
 public:
  // `digest` is what digest() returns; empty: unknown. Throws c10::ValueError if dim 0 differs between tensors or one
  // has no dimension.
  explicit TensorDataset(Batch samples, std::string digest = {});
  static std::shared_ptr<TensorDataset> make(Batch samples, std::string digest = {});

  int64_t size() const override { return size_; }
  Batch get(int64_t index) const;
  Batch get(int64_t index, Random&) const override { return get(index); }
  Batch get_batch(const at::Tensor& indices, std::span<Random> random = {}) const override;

  std::string digest() const override { return digest_; }

  const Batch& samples() const { return samples_; }

 private:
  Batch samples_;
  std::string digest_;
  int64_t size_;
};

// Shuffles `dataset` by `seed` and cuts it into parts of the given sizes, which must add up to its size (throws
// c10::ValueError). The same seed gives the same parts on every machine.
std::vector<std::shared_ptr<TensorDataset>> random_split(const TensorDataset& dataset,
                                                         const std::vector<int64_t>& sizes, uint64_t seed);

}  // namespace fulgur
