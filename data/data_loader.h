#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "fulgur/base/describe.h"
#include "fulgur/core/loader.h"
#include "fulgur/data/dataset.h"
#include "fulgur/data/sampler.h"

namespace fulgur {

struct DataLoaderOptions {
  int64_t batch_size = 1;  // samples
  bool shuffle = false;    // a new order every epoch, derived from `seed`
  uint64_t seed = 0;
  bool drop_last = false;                    // leave out a last batch that is shorter than batch_size
  std::shared_ptr<const Sampler> sampler{};  // a custom order; excludes shuffle
  void describe(FieldVisitor& visit);
};

// Cuts a dataset into batches.
//   auto train = DataLoader::make(dataset, {.batch_size = 32, .shuffle = true, .drop_last = true});
class DataLoader final : public Loader {
 public:
  // Throws UsageError if batch_size is below 1, both shuffle and sampler are given, or the dataset is null.
  DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options);
  static std::shared_ptr<DataLoader> make(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options = {});

  void begin_epoch(int64_t epoch) override;
  std::optional<Batch> next() override;
  std::optional<int64_t> num_batches() const override;
  void skip(int64_t num_samples) override { position_ += num_samples; }
  int64_t batch_size() const override { return batch_size_; }
  State state() const override;  // the seed of shuffle
  void load_state(const State& state) override;

  // Rank r gets the samples r, r + world_size, ... of the epoch's order, so that the batches of all ranks together are
  // those of one process with world_size times the batch_size. With `even`, the last samples are left out (drop_last)
  // or the first ones are repeated, as in torch's DistributedSampler.
  bool set_shard(const DataShard& shard) override;

 private:
  int64_t num_samples() const;  // per epoch, for this rank

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<const Sampler> sampler_;
  int64_t batch_size_;
  bool drop_last_;
  std::optional<uint64_t> seed_{};  // for shuffle; nullopt: not shuffled
  DataShard shard_{};
  at::Tensor indices_{};  // this rank's samples in the current epoch
  int64_t position_ = 0;  // number of samples already returned or skipped
};

}  // namespace fulgur
