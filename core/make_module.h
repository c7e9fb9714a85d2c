#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "fulgur/core/module.h"
#include "fulgur/core/overridden_hooks.h"

namespace fulgur {

// Makes a T that knows which hooks T overrides, so that it may be passed on as a shared_ptr<Module>. If the arguments
// can be copied, the T can also make another T like itself. Arguments are copied once; std::ref shares an argument.
template <class T, class... Args>
std::shared_ptr<T> make_module(Args&&... args) {
  std::shared_ptr<T> module;
  if constexpr ((std::copy_constructible<std::decay_t<Args>> && ...) &&
                std::constructible_from<T, const std::unwrap_ref_decay_t<Args>&...>) {
    auto make = [arguments = std::tuple<std::unwrap_ref_decay_t<Args>...>(args...)] {
      return std::apply([](auto&... argument) { return std::make_shared<T>(argument...); }, arguments);
    };
    module = make();
    module->make_another_ = std::move(make);
  } else {
    module = std::make_shared<T>(std::forward<Args>(args)...);
  }
  module->overridden_hooks_ = overridden_hooks<T>();
  return module;
}

// make_module<Net>({.hidden = 64}) for a T with an options struct T::Options.
template <class T>
  requires requires { typename T::Options; }
std::shared_ptr<T> make_module(typename T::Options options) {
  return make_module<T, typename T::Options>(std::move(options));
}

// A Module together with what is known about its type: the argument of Trainer's entry points. Converts from any
// shared_ptr<T>. Throws UsageError if the pointer is null, or points to a base of an object that make_module did not
// make: the overridden hooks would be those of the wrong type.
class ModuleHandle {
 public:
  template <std::derived_from<Module> T>
  ModuleHandle(std::shared_ptr<T> module)  // NOLINT: implicit, so that fit takes a shared_ptr<T>
      : module_(std::move(module)) {
    check_not_null(typeid(T));
    hooks_ = module_->overridden_hooks_ ? *module_->overridden_hooks_ : hooks_of_static_type<T>();
  }

  Module& operator*() const { return *module_; }
  Module* operator->() const { return module_.get(); }
  const OverriddenHooks& hooks() const { return hooks_; }

 private:
  template <class T>
  OverriddenHooks hooks_of_static_type() const {
    check_same_type(typeid(T));
    return overridden_hooks<T>();
  }
  void check_not_null(const std::type_info& static_type) const;
  void check_same_type(const std::type_info& static_type) const;

  std::shared_ptr<Module> module_;
  OverriddenHooks hooks_;
};

}  // namespace fulgur
