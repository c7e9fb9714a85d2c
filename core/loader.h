#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/batch.h"

namespace fulgur {

// The shard of one of several ranks.
struct DataShard {
  int64_t rank = 0;
  int64_t world_size = 1;
  bool even = false;             // same number of samples on each rank (training); false: no sample twice (evaluation)
  int64_t num_cores = 0;         // cores that this rank may use; 0: those of the process
  bool for_accelerator = false;  // batches are then copied to an accelerator, fastest from page-locked memory
};

// Yields the batches of one epoch after the other. data/data_loader.h has the usual one; derive from Loader for data
// from another source.
// Threading: one thread at a time.
class Loader {
 public:
  virtual ~Loader() = default;

  // Starts the epoch from its first batch. The order of samples is a function of the epoch alone, so that a run can be
  // repeated and resumed.
  virtual void begin_epoch(int64_t epoch) = 0;

  // The next batch, on the host; nullopt once the epoch has ended.
  virtual std::optional<Batch> next() = 0;

  // Batches in an epoch; nullopt if that is not known in advance.
  virtual std::optional<int64_t> num_batches() const = 0;

  // Where in the epoch the next batch begins. A checkpoint keeps it for each rank, and a run that resumes calls go_to()
  // just after begin_epoch(), so that next() continues there. If the number of ranks has changed, every rank gets the
  // position of rank 0: a position must therefore count what all ranks together have consumed, or go_to() must throw.
  // The default, an empty position, means that it is not known: a run that resumes then calls next() for each batch
  // that is already consumed, instead of go_to().
  virtual State position() const { return {}; }
  virtual void go_to(const State& /*position*/) {}

  // Samples in a batch, for what a run prints of itself, and for a resume with another number. nullopt: not known.
  virtual std::optional<int64_t> batch_size() const { return std::nullopt; }

  // What the order of samples depends on in addition to the epoch, such as a seed.
  virtual State state() const { return {}; }
  virtual void load_state(const State&) {}

  // From the next epoch on, yields only the given shard, and num_batches() counts the shard. The Trainer calls it.
  // Returns false if the loader cannot be sharded and yields everything.
  virtual bool set_shard(const DataShard&) { return false; }
};

// The loaders of an evaluation: none, one, or several. Converts from what a user writes: `.val = loader`,
// `.val = {a, b}`, `return nullptr`.
class LoaderList {
 public:
  LoaderList() = default;
  LoaderList(std::nullptr_t) {}  // NOLINT: implicit, as are the next two
  template <std::derived_from<Loader> T>
  LoaderList(std::shared_ptr<T> loader) {
    if (loader != nullptr) list_.push_back(std::move(loader));
  }
  LoaderList(std::initializer_list<std::shared_ptr<Loader>> loaders) : list_(loaders) {}
  explicit LoaderList(std::vector<std::shared_ptr<Loader>> loaders) : list_(std::move(loaders)) {}

  bool empty() const { return list_.empty(); }
  size_t size() const { return list_.size(); }
  const std::shared_ptr<Loader>& operator[](size_t i) const { return list_[i]; }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

 private:
  std::vector<std::shared_ptr<Loader>> list_;
};

}  // namespace fulgur
