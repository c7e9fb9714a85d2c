#pragma once

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/type_name.h"

namespace fulgur {

// Types whose objects are made from options, by name: registry.add<EarlyStopping>() takes the fields that
// EarlyStopping::Options describes, and makes the object by EarlyStopping::make(options). A type without an Options
// that describes itself has no fields, and is made by make(). Not thread-safe: add before options are read.
template <class Product>
class OptionsRegistry {
 public:
  explicit OptionsRegistry(std::string kind) : kind_(std::move(kind)) {}

  // The name is that of the type, without namespaces. Throws UsageError if it is taken.
  template <std::derived_from<Product> T>
  void add() {
    const std::string name = short_type_name(typeid(T));
    const bool added =
        begin_.emplace(canonical_name(name), [](List& list) { return std::make_unique<DraftOf<T>>(list); }).second;
    if (!added) throw UsageError("the " + kind_ + " '" + name + "' is registered already; choose another name");
    names_.push_back(name);
  }

  const std::vector<std::string>& names() const { return names_; }  // in the order of add()

  // A field that appends to `list`, which is borrowed.
  ObjectList list_field(std::vector<std::shared_ptr<Product>>& list) const {
    return {.begin = [this, &list](std::string_view type) -> std::unique_ptr<ObjectDraft> {
      const auto entry = begin_.find(canonical_name(type));
      if (entry == begin_.end()) throw UsageError(unknown_name_message(kind_, type, names_));
      return entry->second(list);
    }};
  }

 private:
  using List = std::vector<std::shared_ptr<Product>>;

  struct NoOptions {};
  template <class T>
  struct OptionsOf {
    using Type = NoOptions;
  };
  template <class T>
    requires internal::Described<typename T::Options>
  struct OptionsOf<T> {
    using Type = typename T::Options;
  };

  template <class T>
  class DraftOf final : public ObjectDraft {
   public:
    explicit DraftOf(List& list) : list_(list) {}
    void describe(FieldVisitor& visit) override {
      if constexpr (internal::Described<Options>) options_.describe(visit);
    }
    void add() override {
      if constexpr (internal::Described<Options>) {
        list_.push_back(T::make(options_));
      } else {
        list_.push_back(T::make());
      }
    }

   private:
    using Options = typename OptionsOf<T>::Type;
    List& list_;
    Options options_{};
  };

  std::string kind_;
  std::vector<std::string> names_{};
  std::map<std::string, std::function<std::unique_ptr<ObjectDraft>(List&)>, std::less<>> begin_{};
};

}  // namespace fulgur
