#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fulgur {

// The order in which an epoch visits the samples: a function of the epoch alone, so that a run can be repeated, resumed
// in the middle, and cut over ranks: of n ranks, rank r gets the samples at the places r, r + n, r + 2 n, ...
class Sampler {
 public:
  virtual ~Sampler() = default;

  // int64, 1-dim; its length is size(). The later passes of an infinite epoch get epoch numbers from 2^32 on.
  virtual at::Tensor indices(int64_t epoch) const = 0;
  virtual int64_t size() const = 0;
};

// Visits the samples in the order of the dataset, in each epoch.
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

// Visits only the given samples, each once in an epoch, shuffled anew in each.
class SubsetSampler final : public Sampler {
 public:
  // `indices`: int64, 1-dim. Throws UsageError if there are none, or a negative one.
  SubsetSampler(at::Tensor indices, uint64_t seed);
  at::Tensor indices(int64_t epoch) const override;
  int64_t size() const override { return indices_.numel(); }

 private:
  at::Tensor indices_;
  RandomSampler order_;
};

struct WeightedSamplerOptions {
  int64_t num_samples = 0;  // samples in an epoch; 0: as many as there are weights
  uint64_t seed = 0;
  bool replacement = true;  // a sample may come several times in an epoch
};

// Draws sample i with a probability in proportion to its weight, anew in each epoch: to show rare classes as often as
// common ones, for example. A sample that comes twice in an epoch draws the same random numbers both times.
// Source: without replacement, Efraimidis and Spirakis 2006, Information Processing Letters 97(5).
class WeightedSampler final : public Sampler {
 public:
  // `weights`: 1-dim, one for each sample of the dataset. Throws UsageError if one is negative or not finite, if all
  // are zero, or if fewer samples have a weight than are to be drawn without replacement.
  explicit WeightedSampler(const at::Tensor& weights, WeightedSamplerOptions options = {});
  at::Tensor indices(int64_t epoch) const override;
  int64_t size() const override { return options_.num_samples; }

 private:
  at::Tensor weights_;  // fp64
  int64_t last_possible_ = 0;
  WeightedSamplerOptions options_;
};

// Chooses whole batches, instead of a Sampler and a batch_size. Of n ranks, rank r gets the batches r, r + n,
// r + 2 n, ...
class BatchSampler {
 public:
  virtual ~BatchSampler() = default;

  // The batches of an epoch, each a 1-dim int64 tensor of at least one index. Their number is size().
  virtual std::vector<at::Tensor> batches(int64_t epoch) const = 0;
  virtual int64_t size() const = 0;
};

struct SimilarLengthSamplerOptions {
  int64_t batch_size = 0;  // samples in a batch; 0: as many as max_tokens allows
  int64_t max_tokens = 0;  // the most tokens in a batch, padding included; 0: no limit
  bool shuffle = true;     // the batches come in a new order every epoch
  uint64_t seed = 0;
};

// Puts samples of similar length into one batch, so that little is padded. Samples are sorted by length, equal lengths
// in an order that the seed decides, and cut into batches, once; the order of the batches changes from epoch to epoch.
// Every sample comes once in an epoch.
class SimilarLengthSampler final : public BatchSampler {
 public:
  // Throws UsageError if there is no length or one below 1, if neither batch_size nor max_tokens is given, or if a
  // sample is longer than max_tokens.
  SimilarLengthSampler(const std::vector<int64_t>& lengths, SimilarLengthSamplerOptions options);
  std::vector<at::Tensor> batches(int64_t epoch) const override;
  int64_t size() const override { return static_cast<int64_t>(batches_.size()); }

 private:
  std::vector<at::Tensor> batches_;  // from short to long samples
  SimilarLengthSamplerOptions options_;
};

}  // namespace fulgur
