#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {

// Creates a Product by name. Built-in and user-defined products are added by the same call. Not thread-safe: add
// before the first Trainer is made.
template <class Product>
class Registry {
 public:
  using Factory = std::function<std::unique_ptr<Product>()>;

  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  // Throws UsageError if the name is taken.
  void add(std::string_view name, Factory factory) {
    const auto [entry, added] = factories_.emplace(canonical_name(name), std::move(factory));
    if (!added) throw UsageError("the " + kind_ + " '" + entry->first + "' is registered already; choose another name");
  }

  // Throws UsageError with the nearest name and the whole list if the name is unknown.
  std::unique_ptr<Product> create(std::string_view name) const {
    const auto entry = factories_.find(canonical_name(name));
    if (entry == factories_.end()) throw UsageError(unknown_name_message(kind_, name, names()));
    return entry->second();
  }

  std::vector<std::string> names() const {  // sorted
    std::vector<std::string> names;
    for (const auto& [name, factory] : factories_) names.push_back(name);
    return names;
  }

 private:
  std::string kind_;
  std::map<std::string, Factory, std::less<>> factories_;
};

}  // namespace fulgur
