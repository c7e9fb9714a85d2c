#include "fulgur/strategies/engine/parameter_versions.h"

#include <utility>

#include "fulgur/base/logging.h"

namespace fulgur {

void ParameterVersions::remember(const FlatParameters& parameters) {
  versions_.resize(parameters.buckets().size());
  for (size_t b = 0; b < versions_.size(); ++b) {
    versions_[b].clear();
    for (const auto& slot : parameters.buckets()[b].slots) versions_[b].push_back(slot.param._version());
  }
}

const std::string* ParameterVersions::written(const FlatParameters& parameters, size_t bucket) const {
  if (bucket >= versions_.size()) return nullptr;
  const auto& slots = parameters.buckets()[bucket].slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].param._version() != versions_[bucket][s]) return &slots[s].name;
  }
  return nullptr;
}

void ParameterVersions::say_is_lost(const std::string& name) {
  if (std::exchange(has_said_, true)) return;
  log_warning(
      "parameter '{}' was written to between steps, which is lost: what is updated is a copy of it; write to "
      "parameters before the first step, or use a strategy and a precision that update them in place",
      name);
}

}  // namespace fulgur
