#include "core/make_module.h"

#include <c10/util/Type.h>
#include <fmt/format.h>

#include "core/error.h"

namespace fulgur {

void ModuleHandle::check_not_null(const std::type_info& static_type) const {
  if (module_ != nullptr) return;
  const std::string type = c10::demangle(static_type.name());
  throw UsageError(fmt::format("the module is a null shared_ptr<{}>; make one with make_module<{}>(...)", type, type));
}

void ModuleHandle::check_same_type(const std::type_info& static_type) const {
  const Module& module = *module_;
  if (typeid(module) == static_type) return;
  const std::string type = c10::demangle(typeid(module).name());
  throw UsageError(
      fmt::format("a {} came as a pointer to its base {}, which hides the hooks it overrides; make it with "
                  "make_module<{}>(...), or pass "
                  "a shared_ptr<{}>",
                  type, c10::demangle(static_type.name()), type, type));
}

}  // namespace fulgur
