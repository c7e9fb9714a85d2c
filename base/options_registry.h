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
// EarlyStopping::Options describes, and makes the object by EarlyStopping::make(options), or, for a type without
// make(), by its constructor from `Args` and the options. A type without Options that describe themselves has no
// fields, and is made without them. `Pointer` is a std::shared_ptr or std::unique_ptr to the base of all types. Not
// thread-safe: add before options are read.
template <class Pointer, class... Args>
class OptionsRegistry {
 public:
  using Product = typename Pointer::element_type;

  // Holds the options of an object, and then makes the object.
  class Draft {
   public:
    virtual ~Draft() = default;
    virtual void describe(FieldVisitor& visit) = 0;
    virtual Pointer make(Args... args) const = 0;  // throws UsageError for options that do not fit
  };

  explicit OptionsRegistry(std::string kind) : kind_(std::move(kind)) {}

  // The name is that of the type, without namespaces. Throws UsageError if it is taken.
  template <std::derived_from<Product> T>
  void add() {
    const std::string name = short_type_name(typeid(T));
    const bool added = begin_.emplace(canonical_name(name), [] { return std::make_unique<DraftOf<T>>(); }).second;
    if (!added) throw UsageError("the " + kind_ + " '" + name + "' is registered already; choose another name");
    names_.push_back(name);
  }

  const std::vector<std::string>& names() const { return names_; }  // in the order of add()

  // Throws UsageError with the nearest name and the whole list if the name is unknown.
  std::unique_ptr<Draft> begin(std::string_view name) const {
    const auto entry = begin_.find(canonical_name(name));
    if (entry == begin_.end()) throw UsageError(unknown_name_message(kind_, name, names_));
    return entry->second();
  }

  // A field that appends to `list`, which is borrowed.
  ObjectList list_field(std::vector<Pointer>& list) const
    requires(sizeof...(Args) == 0)
  {
    return {.begin = [this, &list](std::string_view type) { return std::make_unique<ListDraft>(begin(type), list); },
            .types = names_};
  }

 private:
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
  class DraftOf final : public Draft {
   public:
    void describe(FieldVisitor& visit) override {
      if constexpr (internal::Described<Options>) options_.describe(visit);
    }
    Pointer make(Args... args) const override {
      if constexpr (requires { T::make(options_); }) {
        return T::make(options_);
      } else if constexpr (requires { T::make(); }) {
        return T::make();
      } else if constexpr (internal::Described<Options>) {
        return Pointer(new T(std::move(args)..., options_));
      } else {
        return Pointer(new T(std::move(args)...));
      }
    }

   private:
    using Options = typename OptionsOf<T>::Type;
    Options options_{};
  };

  class ListDraft final : public ObjectDraft {
   public:
    ListDraft(std::unique_ptr<Draft> draft, std::vector<Pointer>& list) : draft_(std::move(draft)), list_(list) {}
    void describe(FieldVisitor& visit) override { draft_->describe(visit); }
    void add() override { list_.push_back(draft_->make()); }

   private:
    std::unique_ptr<Draft> draft_;
    std::vector<Pointer>& list_;
  };

  std::string kind_;
  std::vector<std::string> names_{};
  std::map<std::string, std::function<std::unique_ptr<Draft>()>, std::less<>> begin_{};
};

}  // namespace fulgur
