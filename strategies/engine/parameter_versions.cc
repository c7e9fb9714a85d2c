#include "fulgur/strategies/engine/parameter_versions.h"

#include <utility>

#include "fulgur/base/logging.h"

namespace fulgur {

void ParameterVersions::remember(const FlatParameters& parameters) {
  versions_.clear();
  remember_new(parameters);
}

void ParameterVersions::remember(const FlatParameters& parameters, size_t bucket) {
  versions_[bucket].clear();
  for (const auto& slot : parameters.buckets()[bucket].slots) versions_[bucket].push_back(slot.param._version());
}

void ParameterVersions::remember_new(const FlatParameters& parameters) {
  const size_t num_known = versions_.size();
  versions_.resize(parameters.buckets().size());
  for (size_t b = num_known; b < versions_.size(); ++b) remember(parameters, b);
}

const std::string* ParameterVersions::written(const FlatParameters& parameters, size_t bucket) const {
  if (bucket >= versions_.size()) return nullptr;
  const auto& slots = parameters.buckets()[bucket].slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].param._version() != versions_[bucket][s]) return &slots[s].name;
  }
  return nullptr;
}

void ParameterVersions::warn_of_lost_write(const std::string& name) {
  if (std::exchange(has_said_, true)) return;
  log_warning(
      "parameter '{}' was written to between steps; the new value is lost, because updates are made to a copy; write "
      "to parameters before the first step, or use a strategy and a precision that update them in place",
      name);
}

}  // namespace fulgur
