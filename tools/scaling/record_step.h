#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "fulgur/core/model_memory.h"
#include "fulgur/distributed/world.h"
#include "fulgur/strategies/strategy_choice.h"
#include "tools/scaling/recorder.h"

namespace fulgur::scaling {

// A model of `layers` equal layers. Those of a transformer have four matrices of together 12 width^2 elements; those of
// a perceptron one of width^2.
struct ModelShape {
  int64_t layers = 1;
  int64_t width = 32;
  bool is_perceptron = false;

  int64_t num_params() const { return (is_perceptron ? 1 : 12) * layers * width * width; }
};

// The transformer with about this many parameters, of that width.
ModelShape shape_of(double num_params, int64_t width);

struct RecordedStep {
  std::vector<Event> events;
  int64_t num_params = 0;     // elements of the model that was recorded
  int64_t element_bytes = 4;  // size of a parameter
  int64_t shards = 1;         // ranks among which the update was divided
  int64_t num_updates = 0;    // events of the kind `update`
};

// Runs the strategy on this world, and returns the events of its third step: the first steps learn the order of
// launches. The model of `shape` is real and small: it has the layers of a large model with narrower matrices, and the
// strategy's buckets have to be smaller by as much.
RecordedStep record_step(const StrategyChoice& strategy, const ModelShape& shape, std::string_view precision,
                         World& world, const std::shared_ptr<Recorder>& recorder);

// The same on rank 0 of world_size imagined ranks.
RecordedStep record_step(const StrategyChoice& strategy, const ModelShape& shape, std::string_view precision,
                         int64_t world_size);

// The memory that a rank of the large model keeps on a GPU, by the engine's own estimate; nothing is allocated.
ModelMemory memory_of(const StrategyChoice& strategy, const ModelShape& shape, std::string_view precision,
                      int64_t world_size, int64_t num_hosts);

}  // namespace fulgur::scaling
