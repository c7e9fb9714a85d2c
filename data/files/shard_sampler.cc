#include "fulgur/data/files/shard_sampler.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "fulgur/data/random.h"

namespace fulgur {
namespace {

// Fisher and Yates 1938.
void shuffle(std::span<int64_t> values, Random& random) {
  for (size_t i = values.size(); i > 1; --i) {
    std::swap(values[i - 1], values[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
}

}  // namespace

void ShardSamplerOptions::describe(FieldVisitor& visit) {
  visit({.name = "shards_at_once", .help = "shards whose samples are mixed", .min = 1}, &shards_at_once);
  visit({.name = "seed", .help = "number that decides the orders"}, &seed);
}

ShardSampler::ShardSampler(std::vector<int64_t> shard_sizes, ShardSamplerOptions options) : options_(options) {
  check_fields("ShardSampler", options);
  for (const int64_t size : shard_sizes) begins_.push_back(begins_.back() + size);
}

at::Tensor ShardSampler::indices(int64_t epoch) const {
  Random random = SampleRandom{.seed = options_.seed, .epoch = epoch}.of(0);
  std::vector<int64_t> shards(begins_.size() - 1);
  std::iota(shards.begin(), shards.end(), 0);
  shuffle(shards, random);

  at::Tensor order = at::empty({size()}, at::kLong);
  int64_t* next = order.mutable_data_ptr<int64_t>();
  const auto shards_at_once = static_cast<size_t>(options_.shards_at_once);
  for (size_t first = 0; first < shards.size(); first += std::min(shards_at_once, shards.size() - first)) {
    int64_t* const begin = next;
    for (const int64_t shard : std::span(shards).subspan(first, std::min(shards_at_once, shards.size() - first))) {
      const auto i = static_cast<size_t>(shard);
      const int64_t num_samples = begins_[i + 1] - begins_[i];
      std::iota(next, next + num_samples, begins_[i]);
      next += num_samples;
    }
    shuffle({begin, next}, random);
  }
  return order;
}

}  // namespace fulgur
