#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fulgur {

// The order in which an epoch visits the samples: a function of the epoch alone, so that a run can be repeated, resumed
// in the middle, and cut over ranks.
class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual at::Tensor indices(int64_t epoch) const = 0;  // int64, 1-dim; its length is size()
  virtual int64_t size() const = 0;
};

class SequentialSampler final : public Sampler {
 public:
  explicit SequentialSampler(int64_t size) : size_(size) {}
  at::Tensor indices(int64_t epoch) const override;
  int64_t size() const override { return size_; }

 private:
  int64_t size_;
};

// Visits every sample once, in an order that the seed and the epoch decide. Draws from its own generator and leaves the
// global one alone.
class RandomSampler final : public Sampler {
 public:
  RandomSampler(int64_t size, uint64_t seed) : size_(size), seed_(seed) {}
  at::Tensor indices(int64_t epoch) const override;
  int64_t size() const override { return size_; }

 private:
  int64_t size_;
  uint64_t seed_;
};

}  // namespace fulgur
