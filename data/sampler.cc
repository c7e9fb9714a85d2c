#include "fulgur/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/data/random.h"

namespace fulgur {
namespace {

at::Generator generator_of(uint64_t seed, int64_t epoch) {
  return at::make_generator<at::CPUGeneratorImpl>(mix_bits(seed + mix_bits(static_cast<uint64_t>(epoch))));
}

// Samples from short to long; equal lengths are in an order that the seed decides.
std::vector<int64_t> by_length(const std::vector<int64_t>& lengths, uint64_t seed) {
  const at::Tensor drawn = RandomSampler(std::ssize(lengths), seed).indices(0);
  std::vector<int64_t> samples(drawn.data_ptr<int64_t>(), drawn.data_ptr<int64_t>() + drawn.numel());
  std::ranges::stable_sort(samples, {}, [&](int64_t i) { return lengths[static_cast<size_t>(i)]; });
  return samples;
}

}  // namespace

at::Tensor SequentialSampler::indices(int64_t) const { return at::arange(size_, at::kLong); }

at::Tensor RandomSampler::indices(int64_t epoch) const {
  return at::randperm(size_, generator_of(seed_, epoch), at::kLong);
}

SubsetSampler::SubsetSampler(at::Tensor indices, uint64_t seed)
    : indices_(std::move(indices)), order_(indices_.numel(), seed) {
  if (indices_.dim() != 1 || indices_.scalar_type() != at::kLong || indices_.numel() == 0) {
    throw UsageError(fmt::format("SubsetSampler: the indices must be a list of at least one int64; got {} numbers",
                                 indices_.numel()));
  }
  if (const auto least = indices_.min().item<int64_t>(); least < 0) {
    throw UsageError(fmt::format("SubsetSampler: {} is no index of a sample", least));
  }
}

at::Tensor SubsetSampler::indices(int64_t epoch) const { return indices_.index_select(0, order_.indices(epoch)); }

WeightedSampler::WeightedSampler(const at::Tensor& weights, WeightedSamplerOptions options) : options_(options) {
  if (weights.dim() != 1 || weights.numel() == 0) {
    throw UsageError("WeightedSampler: the weights must be a list with one number for each sample");
  }
  weights_ = weights.to(at::kDouble);
  if (options_.num_samples == 0) options_.num_samples = weights_.numel();
  const at::Tensor bad = weights_.isfinite().logical_and_(weights_.ge(0)).logical_not_().nonzero();
  if (bad.numel() > 0) {
    const auto first = bad[0][0].item<int64_t>();
    throw UsageError(fmt::format("WeightedSampler: the weight of sample {} is {}; weights must be 0 or more", first,
                                 weights_[first].item<double>()));
  }
  const at::Tensor drawable = weights_.nonzero();
  const int64_t possible = drawable.size(0);
  if (possible == 0) throw UsageError("WeightedSampler: all weights are 0, so that no sample can be drawn");
  if (options_.num_samples < 0 || (!options_.replacement && options_.num_samples > possible)) {
    throw UsageError(
        fmt::format("WeightedSampler: num_samples is {}, but {} samples have a weight above 0 and each may be drawn "
                    "once; draw fewer, or set replacement",
                    options_.num_samples, possible));
  }
  last_possible_ = drawable[-1][0].item<int64_t>();
  if (!weights_.sum().isfinite().item<bool>()) weights_ = weights_.div(weights_.max());
}

at::Tensor WeightedSampler::indices(int64_t epoch) const {
  const at::Generator generator = generator_of(options_.seed, epoch);
  if (!options_.replacement) {  // the largest log(u) / w are drawn first; a weight of 0 gives -infinity
    const at::Tensor keys = at::rand(weights_.numel(), generator, at::kDouble).log_().div_(weights_);
    return keys.argsort(/*stable=*/true, 0, /*descending=*/true).slice(0, 0, options_.num_samples);
  }
  const at::Tensor ends = weights_.cumsum(0);
  const at::Tensor drawn = at::rand(options_.num_samples, generator, at::kDouble).mul_(ends[-1]);
  return at::searchsorted(ends, drawn, /*out_int32=*/false, /*right=*/true).clamp_max_(last_possible_);
}

SimilarLengthSampler::SimilarLengthSampler(const std::vector<int64_t>& lengths, SimilarLengthSamplerOptions options)
    : options_(options) {
  if (lengths.empty() || *std::ranges::min_element(lengths) < 1) {
    throw UsageError("SimilarLengthSampler: there must be a length of at least 1 for each sample");
  }
  if (options_.batch_size < 1 && options_.max_tokens < 1) {
    throw UsageError("SimilarLengthSampler: give a batch_size, max_tokens, or both");
  }
  const auto longest = std::ranges::max_element(lengths);
  if (options_.max_tokens > 0 && *longest > options_.max_tokens) {
    throw UsageError(
        fmt::format("SimilarLengthSampler: sample {} has {} tokens, more than max_tokens ({}); cut it, or leave it out",
                    longest - lengths.begin(), *longest, options_.max_tokens));
  }
  std::vector<int64_t> batch;
  for (const int64_t sample : by_length(lengths, options_.seed)) {  // the last one of a batch is its longest
    const int64_t tokens = (std::ssize(batch) + 1) * lengths[static_cast<size_t>(sample)];
    const bool is_full = options_.batch_size > 0 && std::ssize(batch) == options_.batch_size;
    if (is_full || (options_.max_tokens > 0 && tokens > options_.max_tokens)) {
      batches_.push_back(at::tensor(std::exchange(batch, {})));
    }
    batch.push_back(sample);
  }
  batches_.push_back(at::tensor(batch));
}

std::vector<at::Tensor> SimilarLengthSampler::batches(int64_t epoch) const {
  if (!options_.shuffle) return batches_;
  const at::Tensor order = RandomSampler(size(), options_.seed).indices(epoch);
  std::vector<at::Tensor> shuffled;
  shuffled.reserve(batches_.size());
  for (int64_t i = 0; i < size(); ++i) shuffled.push_back(batches_[static_cast<size_t>(order.data_ptr<int64_t>()[i])]);
  return shuffled;
}

}  // namespace fulgur
