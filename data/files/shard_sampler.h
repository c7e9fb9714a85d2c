#pragma once

#include <cstdint>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/data/sampler.h"

namespace fulgur {

struct ShardSamplerOptions {
  int64_t shards_at_once = 8;  // samples of so many shards are mixed; more mixes better, and reads less sequentially
  uint64_t seed = 0;
  void describe(FieldVisitor& visit);
};

// Visits every sample of a dataset in shards (TarDataset::shard_sizes()) once per epoch: the shards in a random order,
// and the samples of each `shards_at_once` of them in a random order. At any time few shards are being read, and the
// system has them in memory. The order is decided by seed and epoch.
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
