#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "fulgur/base/error.h"

namespace fulgur {

// State that is kept for a later run: values by name. A '/' in a name makes a folder of names, so that one State holds
// the states of many objects, each under its own name.
//   State state;
//   state.set("best_score", 0.93);
//   all.set_child("callbacks/ModelCheckpoint", state);
//   const double best = all.child("callbacks/ModelCheckpoint").get<double>("best_score");
class State {
 public:
  using Value = std::variant<bool, int64_t, double, std::string, at::Tensor>;
  using Values = std::map<std::string, Value, std::less<>>;

  // Replaces an existing value. Write int64_t{3}, not 3. Throws UsageError for an undefined tensor.
  void set(std::string_view name, Value value);

  // Throws CheckpointError with the name if the value is missing or of another type.
  template <class T>
  const T& get(std::string_view name) const {
    if (const T* value = find<T>(name)) return *value;
    fail(name);
  }

  // Null if the value is missing. Throws CheckpointError if it is of another type.
  template <class T>
  const T* find(std::string_view name) const {
    const auto entry = values_.find(name);
    if (entry == values_.end()) return nullptr;
    if (const T* value = std::get_if<T>(&entry->second)) return value;
    fail(name);
  }

  void erase(std::string_view name) {
    if (const auto entry = values_.find(name); entry != values_.end()) values_.erase(entry);
  }

  void set_child(std::string_view name, const State& child);  // adds the child's values as "<name>/..."
  State child(std::string_view name) const;                   // empty if there is none

  bool empty() const { return values_.empty(); }
  const Values& values() const { return values_; }

 private:
  [[noreturn]] void fail(std::string_view name) const;

  Values values_;
};

}  // namespace fulgur
