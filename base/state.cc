#include "fulgur/base/state.h"

#include <fmt/format.h>

#include <utility>

namespace fulgur {

void State::set(std::string_view name, Value value) {
  if (const auto* tensor = std::get_if<at::Tensor>(&value); tensor != nullptr && !tensor->defined()) {
    throw UsageError(fmt::format("'{}' cannot be kept in a state: it is an undefined tensor; leave it out", name));
  }
  values_.insert_or_assign(std::string(name), std::move(value));
}

void State::set_child(std::string_view name, const State& child) {
  for (const auto& [own, value] : child.values_) set(fmt::format("{}/{}", name, own), value);
}

State State::child(std::string_view name) const {
  const std::string prefix = fmt::format("{}/", name);
  State child;
  for (auto entry = values_.lower_bound(prefix); entry != values_.end() && entry->first.starts_with(prefix); ++entry) {
    child.set(std::string_view(entry->first).substr(prefix.size()), entry->second);
  }
  return child;
}

void State::fail(std::string_view name) const {
  throw CheckpointError(values_.contains(name)
                            ? fmt::format("the saved state has '{}' with another type than expected", name)
                            : fmt::format("the saved state lacks '{}'", name));
}

}  // namespace fulgur
