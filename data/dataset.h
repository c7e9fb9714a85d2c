#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fulgur/core/batch.h"

namespace fulgur {

// A known number of samples, each readable by its index. Derive from it for data that is read or generated sample by
// sample; TensorDataset serves samples that are in memory.
// Threading: the const members may be called by several threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples

  // One sample: tensors without a batch dimension. 0 <= index < size().
  virtual Batch get(int64_t index) const = 0;

  // The samples at `indices` (int64, 1-dim), stacked along a new dim 0. Override it if reading many samples at once is
  // faster than one by one. Throws c10::ValueError, with the name, if samples differ in names or shapes.
  virtual Batch get_batch(const at::Tensor& indices) const;
};

}  // namespace fulgur
