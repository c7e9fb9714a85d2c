#pragma once

#include <cstdint>
#include <optional>

#include "core/batch.h"

namespace fulgur {

// Hands out the batches of one epoch after the other. data/data_loader.h has the one most people use; derive from this
// for data that comes from elsewhere.
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
};

}  // namespace fulgur
