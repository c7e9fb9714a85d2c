#include "strategies/estimate_memory.h"

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "strategies/precision.h"
#include "strategies/presets.h"

namespace fulgur {

ModelMemory estimate_memory(const Module& module, const StrategyChoice& strategy, int64_t world_size,
                            std::string_view precision, const Optimizers& optimizers, c10::DeviceType device_type) {
  const auto made = strategy.make("single_device");
  const auto memory = made->model_memory(module, optimizers, Precision(precision), world_size, device_type);
  if (memory) return *memory;
  throw UsageError(
      fmt::format("strategy '{}' does not say what memory it needs; it would override model_memory()", made->name()));
}

std::string estimate_memory_table(const Module& module, int64_t world_size, std::string_view precision,
                                  const Optimizers& optimizers, c10::DeviceType device_type) {
  std::vector<std::pair<std::string, ModelMemory>> rows;
  for (const std::string& name : strategy_registry().names()) {
    const auto memory = strategy_registry().create(name)->model_memory(module, optimizers, Precision(precision),
                                                                       world_size, device_type);
    if (memory) rows.emplace_back(name, *memory);
  }
  return format_memory(rows);
}

}  // namespace fulgur
