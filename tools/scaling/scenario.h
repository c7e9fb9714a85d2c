#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fulgur/core/model_memory.h"
#include "tools/scaling/machine.h"
#include "tools/scaling/record_step.h"
#include "tools/scaling/replay.h"

namespace fulgur::scaling {

struct ScenarioOptions {
  double num_params = 10e9;
  int64_t width = 4096;
  int64_t tokens = 1024;
  int64_t batch = 8;            // samples of a rank and step, as far as memory allows
  int64_t global_batch = 1024;  // samples of all ranks in strong scaling
  int64_t hosts = 16;
  int64_t ranks_per_host = 8;
  int64_t max_ranks = 1024;
  std::string device = "h100";
  std::string within{};                 // empty: the device's own
  std::string between{};                // empty: the device's own
  std::string precision = "bf16-true";  // or bf16-mixed
  // Constants that were measured elsewhere; 0: those of the device and the links.
  double tflops = 0;            // reached by forward and backward
  double within_gb_s = 0;       // sent by a rank to others of its host
  double between_gb_s = 0;      // sent by a host
  double to_host_gb_s = 0;      // copied by a rank to its host, or back
  double host_memory_gb_s = 0;  // read and written by the update of a rank on its host
};

// The strategies that are compared, in the order of columns.
enum class Compared { ddp, sharded, hybrid, offload };
inline constexpr Compared kCompared[] = {Compared::ddp, Compared::sharded, Compared::hybrid, Compared::offload};
std::string name_of(Compared strategy);

// A step of one strategy.
struct Outcome {
  int64_t batch = 0;          // samples that a rank has in a step
  int64_t micro_batches = 1;  // in as many parts
  ModelMemory memory{};       // what a rank keeps, without activations
  double activation_bytes = 0;
  StepTime time{};
  double flops_per_s = 0;  // what a rank reaches, not counting what it computes again
};

// A model on a machine.
class Scenario {
 public:
  // Throws UsageError for unknown names, for numbers that make no model, and for a max_ranks below the first of
  // ranks().
  explicit Scenario(ScenarioOptions options);

  const ScenarioOptions& options() const { return options_; }
  const Machine& machine() const { return machine_; }
  const ModelShape& shape() const { return shape_; }

  // The numbers of ranks of the tables: 8, 16, ..., or, if the ranks of a host are no power of two, those of one host,
  // of two, of four, ...
  const std::vector<int64_t>& ranks() const { return ranks_; }

  // The step with options().batch samples a rank, or as many as fit; nullopt if none fits.
  std::optional<Outcome> weak(Compared strategy, int64_t ranks);

  // The step with options().global_batch samples over all ranks; nullopt if none fits, or a rank gets none.
  std::optional<Outcome> strong(Compared strategy, int64_t ranks);

 private:
  int64_t shards(Compared strategy, int64_t ranks) const;
  ModelMemory memory(Compared strategy, int64_t ranks, bool accumulates) const;
  int64_t samples_that_fit(const ModelMemory& memory) const;
  const RecordedStep& recorded(Compared strategy, int64_t ranks, bool accumulates);
  Outcome outcome(Compared strategy, int64_t ranks, int64_t micro_batch, int64_t micro_batches,
                  const ModelMemory& memory);

  const ScenarioOptions options_;
  Machine machine_;
  ModelShape shape_;
  std::vector<int64_t> ranks_;
  // By strategy, whether a rank is alone, and whether a step has several micro-batches.
  std::map<std::tuple<Compared, bool, bool>, RecordedStep> recorded_;
};

}  // namespace fulgur::scaling
