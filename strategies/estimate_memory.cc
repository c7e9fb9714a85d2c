#include "fulgur/strategies/estimate_memory.h"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/presets.h"

namespace fulgur {
namespace {

MemoryRequest request_of(int64_t world_size, std::string_view precision, c10::DeviceType device_type,
                         int64_t accumulate_grad_batches, int64_t num_nodes = 1) {
  return {.precision = Precision(precision),
          .num_devices = world_size,
          .num_nodes = num_nodes,
          .device_type = device_type,
          .accumulates = accumulate_grad_batches > 1};
}

}  // namespace

ModelMemory estimate_memory(const Module& module, const StrategyChoice& strategy, int64_t world_size,
                            std::string_view precision, const Optimizers& optimizers, c10::DeviceType device_type,
                            int64_t accumulate_grad_batches, int64_t num_nodes) {
  const auto made = strategy.make("single_device");
  const auto memory = made->model_memory(
      module, optimizers, request_of(world_size, precision, device_type, accumulate_grad_batches, num_nodes));
  if (memory) return *memory;
  throw UsageError(
      fmt::format("strategy '{}' does not say what memory it needs; it would override model_memory()", made->name()));
}

std::string estimate_memory_table(const Module& module, int64_t world_size, std::string_view precision,
                                  const Optimizers& optimizers, c10::DeviceType device_type,
                                  int64_t accumulate_grad_batches) {
  const MemoryRequest request = request_of(world_size, precision, device_type, accumulate_grad_batches);
  std::vector<std::pair<std::string, ModelMemory>> rows;
  for (const std::string& name : strategy_registry().names()) {
    const auto memory = strategy_registry().create(name)->model_memory(module, optimizers, request);
    if (memory) rows.emplace_back(name, *memory);
  }
  return format_memory(rows);
}

}  // namespace fulgur
