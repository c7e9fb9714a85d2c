#include "fulgur/checkpoint/formats/name_map.h"

namespace fulgur {

std::optional<std::string> NameMap::operator()(std::string_view name) const {
  for (const Rule& rule : rules) {
    const bool is_prefix = rule.from.empty() || rule.from.ends_with('.');
    if (is_prefix ? !name.starts_with(rule.from) : name != rule.from) continue;
    if (!rule.to) return std::nullopt;
    return *rule.to + std::string(name.substr(rule.from.size()));
  }
  return std::string(name);
}

}  // namespace fulgur
