#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/job_queue.h"
#include "fulgur/core/loader.h"
#include "fulgur/data/collate.h"
#include "fulgur/data/dataset.h"
#include "fulgur/data/epoch_plan.h"
#include "fulgur/data/sampler.h"

namespace fulgur {

// The number of threads that read ahead, or "auto": the cores of this rank minus one, which the training step keeps.
class Workers {
 public:
  template <std::integral I>
  Workers(I count) : Workers(std::string_view(std::to_string(count))) {}  // NOLINT: implicit; throws UsageError
  Workers(std::string_view text);                                         // NOLINT: throws UsageError
  Workers(const char* text) : Workers(std::string_view(text)) {}          // NOLINT

  std::string to_string() const;           // in the form that the constructor takes
  int64_t count(int64_t num_cores) const;  // threads for a rank with `num_cores` cores; 0: the cores of the process

 private:
  std::optional<int64_t> count_;  // nullopt: auto
};

struct DataLoaderOptions {
  int64_t batch_size = 1;                    // samples
  bool shuffle = false;                      // a new order every epoch, derived from `seed`
  uint64_t seed = 0;                         // decides the orders, and what samples draw from their Random
  bool drop_last = false;                    // leave out a last batch that is shorter than batch_size
  Workers workers = 0;                       // threads that read ahead; 0: the caller of next() reads
  int64_t prefetch_batches = 2;              // the most batches that each worker reads ahead
  double timeout_s = 0;                      // the longest that next() waits for a worker; 0: no limit
  bool infinite = false;                     // an epoch never ends: one pass over the samples follows another
  std::shared_ptr<const Sampler> sampler{};  // a custom order; excludes shuffle
  std::shared_ptr<const BatchSampler> batch_sampler{};  // excludes batch_size, shuffle, drop_last and sampler
  Collate collate{};  // null: samples are stacked (Dataset::get_batch); pad_to_longest() pads them
  void describe(FieldVisitor& visit);
};

// Cuts a dataset into batches.
//   auto train = DataLoader::make(dataset, {.batch_size = 32, .shuffle = true, .drop_last = true, .workers = "auto"});
// With workers, background threads read batches ahead. The number of workers changes neither the order nor the content
// of batches: a batch depends on the seed, the epoch and its place in the epoch alone. The threads stay from epoch to
// epoch; they end with the loader, and when a dataset throws. If training runs on a GPU, they put batches into
// page-locked memory.
// Errors: an exception of a dataset reaches next() when the turn of its batch comes; text_of() names the sample and the
// dataset. The next call of next() reads the failed batch again. next() throws DataError for a worker that takes longer
// than timeout_s, and for a dataset that draws from torch's global generator in a worker while the first batch of an
// epoch is read: such numbers would depend on which thread comes first.
class DataLoader final : public Loader {
 public:
  // Throws UsageError if an option is out of range, if two of them exclude each other, or if the dataset is null.
  DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options);
  ~DataLoader() override;
  static std::shared_ptr<DataLoader> make(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options = {});

  void begin_epoch(int64_t epoch) override;
  std::optional<Batch> next() override;
  std::optional<int64_t> num_batches() const override;
  std::optional<int64_t> batch_size() const override {
    return options_.batch_sampler ? std::nullopt : std::optional(options_.batch_size);
  }

  // A position counts samples (with a batch_sampler: batches) in the order that all ranks share, so that any number of
  // ranks can resume from it. go_to() throws CheckpointError for a position in another dataset, or in another order,
  // such as that of a sampler with another seed.
  State position() const override;
  void go_to(const State& position) override;

  State state() const override;  // the seed
  void load_state(const State& state) override;

  // Rank r gets the samples r, r + world_size, ... of the epoch's order, so that the batches of all ranks together are
  // those of one process with world_size times the batch_size. With a batch_sampler, it gets every world_size-th batch.
  // With `even`, all ranks get equally many: the last samples are left out (drop_last) or the first are repeated, as in
  // torch's DistributedSampler. Throws UsageError if there are fewer samples than ranks.
  bool set_shard(const DataShard& shard) override;

 private:
  // The part that workers share with the loader; a worker that hangs may outlive the loader.
  struct Source {
    std::shared_ptr<const Dataset> dataset;
    uint64_t seed;
    Collate collate;
    Batch read(const PlannedBatch& planned) const;
  };
  struct Pending {
    std::shared_future<void> read;
    std::shared_ptr<Batch> batch;  // empty until it is read
    int64_t place_after;
  };

  std::optional<Batch> read_now();
  std::optional<Batch> take_from_workers();
  void read_ahead();
  void wait_for(const std::shared_future<void>& read) const;
  bool is_done_in_time(const std::shared_future<void>& read) const;
  void drop_pending();
  void stop_workers();

  DataLoaderOptions options_;
  std::shared_ptr<const Source> source_{};
  std::string digest_{};
  EpochCut cut_{};
  int64_t num_workers_ = 0;  // in the current epoch
  int64_t epoch_ = 0;
  int64_t place_ = 0;                               // the next batch's place in the order of the epoch
  bool is_first_ = true;                            // the next batch is the first that workers read in this epoch
  std::optional<EpochPlan> plan_{};                 // nullopt before the first epoch
  std::deque<Pending> pending_{};                   // in the order of the epoch
  std::vector<Pending> dropped_{};                  // no longer wanted, but perhaps being read
  std::shared_ptr<std::atomic<bool>> is_wanted_{};  // tells pending jobs that they are dropped, if false
  std::unique_ptr<JobQueue> workers_{};
};

}  // namespace fulgur
