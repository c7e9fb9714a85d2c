#pragma once

#include <cstdint>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/data/sampler.h"

namespace fulgur {

struct ShardSamplerOptions {
  int64_t shards_at_once = 8;  // shards whose samples are mixed; more shards mix better, but are read less in sequence
  uint64_t seed = 0;
  void describe(FieldVisitor& visit);
};

// Visits every sample of a dataset in shards (TarDataset::shard_sizes()) once per epoch: the shards in a random order,
// and the samples of each `shards_at_once` of them in a random order. So few shards are read at a time that the system
// can keep them in memory. Seed and epoch decide the order.
class ShardSampler final : public Sampler {
 public:
  // Throws UsageError for options out of range.
  explicit ShardSampler(std::vector<int64_t> shard_sizes, ShardSamplerOptions options = {});
  at::Tensor indices(int64_t epoch) const override;
  int64_t size() const override { return begins_.back(); }

 private:
  std::vector<int64_t> begins_{0};  // index of the first sample of each shard; at the end the number of samples
  ShardSamplerOptions options_;
};

}  // namespace fulgur
