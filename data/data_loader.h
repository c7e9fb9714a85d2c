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

// How many threads read ahead: a number, or "auto": one for each core of this rank but one, which is the step's.
class Workers {
 public:
  template <std::integral I>
  Workers(I count) : Workers(std::string_view(std::to_string(count))) {}  // NOLINT: implicit; throws UsageError
  Workers(std::string_view text);                                         // NOLINT: throws UsageError
  Workers(const char* text) : Workers(std::string_view(text)) {}          // NOLINT

  std::string to_string() const;           // in the form that the constructor takes
  int64_t count(int64_t num_cores) const;  // threads for a rank with so many cores; 0: those of the process

 private:
  std::optional<int64_t> count_;  // nullopt: auto
};

struct DataLoaderOptions {
  int64_t batch_size = 1;                    // samples
  bool shuffle = false;                      // a new order every epoch, derived from `seed`
  uint64_t seed = 0;                         // decides the orders, and what samples draw from their Random
  bool drop_last = false;                    // leave out a last batch that is shorter than batch_size
  Workers workers = 0;                       // threads that read ahead; 0: next() reads
  int64_t prefetch_batches = 2;              // for each worker: the most that are read before they are asked for
  double timeout_s = 0;                      // the longest that next() waits for a worker; 0: any time
  bool infinite = false;                     // an epoch never ends: one pass over the samples follows another
  std::shared_ptr<const Sampler> sampler{};  // a custom order; excludes shuffle
  std::shared_ptr<const BatchSampler> batch_sampler{};  // excludes batch_size, shuffle, drop_last and sampler
  Collate collate{};  // null: samples are stacked (Dataset::get_batch); pad_to_longest() pads them
  void describe(FieldVisitor& visit);
};

// Cuts a dataset into batches.
//   auto train = DataLoader::make(dataset, {.batch_size = 32, .shuffle = true, .drop_last = true, .workers = "auto"});
// With workers, batches are read ahead in background threads and come in the order that they have without: what a
// batch has in it depends on the seed, the epoch and its place alone. The threads stay from epoch to epoch; they end
// with the loader, and when a dataset throws. Where training runs on a GPU they put batches into page-locked memory.
// Errors: what a dataset throws reaches next() when it is the batch's turn; text_of() names the sample and the dataset.
// A batch after the one that failed is not read: next() tries that one again. next() throws DataError for a worker that
// takes longer than timeout_s, and for a dataset that draws from torch's global generator in a worker while the first
// batch of an epoch is read: the numbers would depend on which thread comes first.
class DataLoader final : public Loader {
 public:
  // Throws UsageError if an option is out of range, if two of them exclude each other, or if the dataset is null.
  DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options);
  ~DataLoader() override;
  static std::shared_ptr<DataLoader> make(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options = {});

  void begin_epoch(int64_t epoch) override;
  std::optional<Batch> next() override;
  std::optional<int64_t> num_batches() const override;
  int64_t batch_size() const override { return options_.batch_size; }

  // The place is one in the order that all ranks have in common, so that any number of ranks goes on there. go_to()
  // throws CheckpointError if the position is one of another dataset.
  State position() const override;
  void go_to(const State& position) override;

  State state() const override;  // the seed
  void load_state(const State& state) override;

  // Rank r gets the samples r, r + world_size, ... of the epoch's order, so that the batches of all ranks together are
  // those of one process with world_size times the batch_size. With a batch_sampler, it gets every world_size-th batch.
  // With `even`, the last ones are left out (drop_last) or the first ones are repeated, as in torch's
  // DistributedSampler. Throws UsageError if there are fewer samples than ranks.
  bool set_shard(const DataShard& shard) override;

 private:
  // What workers share with the loader, which they may outlive if they hang.
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
  int64_t place_ = 0;                               // in the order of the epoch, of the next batch
  bool is_first_ = true;                            // the next batch is the first that workers read in this epoch
  std::optional<EpochPlan> plan_{};                 // nullopt before the first epoch
  std::deque<Pending> pending_{};                   // in the order of the epoch
  std::vector<Pending> dropped_{};                  // no longer wanted, but perhaps being read
  std::shared_ptr<std::atomic<bool>> is_wanted_{};  // tells pending jobs that they are dropped, if false
  std::unique_ptr<JobQueue> workers_{};
};

}  // namespace fulgur
