#include "tools/scaling/scenario.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "fulgur/base/error.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/presets.h"

namespace fulgur::scaling {
namespace {

constexpr double kWorkspaceBytes =
    2e9;  // a GPU needs it for a layer that is computed again, and for what its allocator holds
constexpr int64_t kRecordedWidth = 16;

void check_at_least_one(std::string_view name, double value) {
  if (value < 1) throw UsageError(fmt::format("--{} is {}; write 1 or more", name, value));
}

// So that hosts are full, or cut in halves: 8, 16, ... ranks are neither on hosts of 6.
std::vector<int64_t> ranks_of_tables(const ScenarioOptions& options) {
  const bool is_power_of_two = std::has_single_bit(static_cast<uint64_t>(options.ranks_per_host));
  const int64_t first = is_power_of_two ? 8 : options.ranks_per_host;
  std::vector<int64_t> numbers;
  for (int64_t ranks = first; ranks <= options.max_ranks; ranks *= 2) {
    numbers.push_back(ranks);
    if (ranks > options.max_ranks / 2) break;  // twice as many may overflow
  }
  if (numbers.empty()) {
    throw UsageError(fmt::format("--max_ranks is {}, but the tables begin with {} ranks; write --max_ranks={} or more",
                                 options.max_ranks, first, first));
  }
  return numbers;
}

// The links that such devices are usually bought with.
std::string usual_within(std::string_view device) {
  if (device == "cpu") return "shared_memory";
  if (device == "v100") return "nvlink2";
  return device == "a100" ? "nvlink" : "nvlink4";
}

std::string usual_between(std::string_view device) {
  if (device == "cpu") return "100g";
  return device == "v100" ? "800g" : "400g";
}

// The strategy with buckets that are smaller by `scale`.
StrategyChoice choice_of(Compared strategy, int64_t shard_group, double scale) {
  const RankOptions usual;
  const RankOptions ranks{.bucket_cap_mib = usual.bucket_cap_mib * scale,
                          .first_bucket_mib = usual.first_bucket_mib * scale};
  switch (strategy) {
    case Compared::ddp:
      return ranks;
    case Compared::sharded:
      return DdpSharded{.ranks = ranks};
    case Compared::hybrid:
      return DdpSharded{.shard_group = std::to_string(shard_group), .ranks = ranks};
    case Compared::offload:
      return ZeroOffload{.host = {.update_threads = 1}, .ranks = ranks};
  }
  throw UsageError("unknown strategy");
}

}  // namespace

std::string name_of(Compared strategy) {
  switch (strategy) {
    case Compared::ddp:
      return "ddp";
    case Compared::sharded:
      return "ddp_sharded";
    case Compared::hybrid:
      return "shard_group=host";
    case Compared::offload:
      return "zero_offload";
  }
  return "";
}

Scenario::Scenario(ScenarioOptions options) : options_(std::move(options)) {
  check_at_least_one("params", options_.num_params);
  check_at_least_one("width", static_cast<double>(options_.width));
  check_at_least_one("tokens", static_cast<double>(options_.tokens));
  check_at_least_one("batch", static_cast<double>(options_.batch));
  check_at_least_one("global_batch", static_cast<double>(options_.global_batch));
  check_at_least_one("hosts", static_cast<double>(options_.hosts));
  check_at_least_one("gpus", static_cast<double>(options_.ranks_per_host));
  ranks_ = ranks_of_tables(options_);
  if (const Precision precision(options_.precision); precision.name() != "bf16-true" && !precision.is_mixed()) {
    throw UsageError(
        fmt::format("--precision is {}, but the devices' speeds are those in 16 bits; write bf16-true or bf16-mixed",
                    options_.precision));
  }
  machine_.device = device_of(options_.device);
  const std::string& device = machine_.device.name;
  machine_.within = link_of(options_.within.empty() ? usual_within(device) : options_.within);
  machine_.between = link_of(options_.between.empty() ? usual_between(device) : options_.between);
  const auto set = [](double given, double unit, double& constant) {
    if (given < 0)
      throw UsageError("a measured constant is negative; write a positive number, or 0 for the listed one");
    if (given > 0) constant = given * unit;
  };
  set(options_.tflops, 1e12, machine_.device.flops_per_s);
  set(options_.within_gb_s, 1e9, machine_.within.bytes_per_s);
  set(options_.between_gb_s, 1e9, machine_.between.bytes_per_s);
  set(options_.to_host_gb_s, 1e9, machine_.device.to_host_bytes_per_s);
  set(options_.host_memory_gb_s, 1e9, machine_.device.host_bytes_per_s);
  machine_.ranks_per_host = options_.ranks_per_host;
  if (device == "cpu") machine_.cores_per_host = options_.ranks_per_host;
  shape_ = shape_of(options_.num_params, options_.width);
}

int64_t Scenario::shards(Compared strategy, int64_t ranks) const {
  if (strategy == Compared::ddp) return 1;
  return strategy == Compared::hybrid ? std::min(ranks, options_.ranks_per_host) : ranks;
}

ModelMemory Scenario::memory(Compared strategy, int64_t ranks, bool accumulates) const {
  const int64_t hosts = std::max<int64_t>(1, ranks / options_.ranks_per_host);
  const Compared same = strategy == Compared::hybrid && hosts == 1 ? Compared::sharded : strategy;
  return memory_of(choice_of(same, options_.ranks_per_host, /*scale=*/1), shape_, options_.precision, ranks, hosts,
                   accumulates);
}

// Activations are computed again in backward: a sample keeps what enters each layer, in 16 bits.
int64_t Scenario::samples_that_fit(const ModelMemory& memory) const {
  if (machine_.device.memory_bytes == 0) return options_.batch;
  const double per_sample = 2.0 * static_cast<double>(shape_.layers * shape_.width * options_.tokens);
  const double room =
      machine_.device.memory_bytes - kWorkspaceBytes - static_cast<double>(memory.total() - memory.on_host);
  return std::max<int64_t>(0, static_cast<int64_t>(room / per_sample));
}

// The order of gradients, exchanges and updates does not depend on the number of ranks, as long as there are several:
// sizes do, and with them whether a bucket waits for the memory of another a gradient earlier. Hybrid sharding is
// recorded with two groups of two.
const RecordedStep& Scenario::recorded(Compared strategy, int64_t ranks, bool accumulates) {
  if (strategy == Compared::hybrid && ranks <= options_.ranks_per_host) strategy = Compared::sharded;
  const auto [place, is_new] = recorded_.try_emplace({strategy, ranks == 1, accumulates});
  if (is_new) {
    const ModelShape small{.layers = shape_.layers, .width = kRecordedWidth};
    const double narrower = static_cast<double>(small.width) / static_cast<double>(shape_.width);
    const int64_t few = ranks == 1 ? 1 : strategy == Compared::hybrid ? 4 : 2;
    place->second = record_step(choice_of(strategy, /*shard_group=*/2, narrower * narrower), small, options_.precision,
                                few, accumulates);
  }
  return place->second;
}

Outcome Scenario::outcome(Compared strategy, int64_t ranks, int64_t micro_batch, int64_t micro_batches,
                          const ModelMemory& memory) {
  const auto params = static_cast<double>(shape_.num_params());
  const double forward = 2 * params * static_cast<double>(micro_batch * options_.tokens);
  const Workload workload{.num_params = params,
                          .param_bytes = Precision(options_.precision).is_true_16_bit() ? 2.0 : 4.0,
                          .forward_flops = forward,
                          .backward_flops = 3 * forward,  // twice the forward, and the forward again
                          .micro_batches = micro_batches,
                          .shards = shards(strategy, ranks),
                          .updates_on_host = strategy == Compared::offload};
  Outcome outcome{
      .batch = micro_batch * micro_batches,
      .micro_batches = micro_batches,
      .memory = memory,
      .activation_bytes = 2.0 * static_cast<double>(shape_.layers * shape_.width * options_.tokens * micro_batch)};
  outcome.time = replay(recorded(strategy, ranks, micro_batches > 1), workload, machine_, ranks);
  outcome.flops_per_s = 3 * forward * static_cast<double>(micro_batches) / outcome.time.step_s;
  return outcome;
}

std::optional<Outcome> Scenario::weak(Compared strategy, int64_t ranks) {
  const ModelMemory kept = memory(strategy, ranks, /*accumulates=*/false);
  const int64_t batch = std::min(options_.batch, samples_that_fit(kept));
  if (batch == 0) return std::nullopt;
  return outcome(strategy, ranks, batch, /*micro_batches=*/1, kept);
}

// A rank with more samples than fit at once accumulates their gradients, which takes memory, too.
std::optional<Outcome> Scenario::strong(Compared strategy, int64_t ranks) {
  const int64_t of_rank = options_.global_batch / ranks;
  ModelMemory kept = memory(strategy, ranks, /*accumulates=*/false);
  int64_t micro_batch = std::min(options_.batch, samples_that_fit(kept));
  if (micro_batch < of_rank) {
    kept = memory(strategy, ranks, /*accumulates=*/true);
    micro_batch = std::min(options_.batch, samples_that_fit(kept));
  }
  micro_batch = std::min(micro_batch, of_rank);
  while (micro_batch > 1 && of_rank % micro_batch != 0) --micro_batch;
  if (micro_batch == 0) return std::nullopt;
  return outcome(strategy, ranks, micro_batch, of_rank / micro_batch, kept);
}

}  // namespace fulgur::scaling
