#include "fulgur/core/model_memory.h"

#include <fmt/format.h>

#include <algorithm>

namespace fulgur {
namespace {

std::string in_mb(std::optional<int64_t> bytes) {
  return bytes ? fmt::format("{:.4g}", static_cast<double>(*bytes) / 1e6) : "unknown";
}

}  // namespace

std::string format_memory(const std::vector<std::pair<std::string, ModelMemory>>& rows) {
  constexpr std::string_view kCorner = "MB on each rank";
  size_t width = kCorner.size();
  for (const auto& [name, memory] : rows) width = std::max(width, name.size());
  std::string table = fmt::format(
      "{:<{}}  parameters  gradients  optimizer state   copies  buckets   in all  on host\n", kCorner, width);
  table += fmt::format("{:-<{}}\n", "", table.size() - 1);
  for (const auto& [name, memory] : rows) {
    table += fmt::format("{:<{}}  {:>10}  {:>9}  {:>15}  {:>7}  {:>7}  {:>7}  {:>7}\n", name, width,
                         in_mb(memory.parameters), in_mb(memory.gradients), in_mb(memory.optimizer_state),
                         in_mb(memory.copies), in_mb(memory.buckets),
                         (memory.optimizer_state ? "" : ">") + in_mb(memory.total()), in_mb(memory.on_host));
  }
  return table;
}

}  // namespace fulgur
