#include "fulgur/core/make_module.h"

#include <fmt/format.h>

#include "fulgur/base/error.h"
#include "fulgur/base/type_name.h"

namespace fulgur {

void ModuleHandle::check_not_null(const std::type_info& static_type) const {
  if (module_ != nullptr) return;
  const std::string type = type_name(static_type);
  throw UsageError(fmt::format("the module is a null shared_ptr<{}>; make one with make_module<{}>(...)", type, type));
}

void ModuleHandle::check_same_type(const std::type_info& static_type) const {
  const Module& module = *module_;
  if (typeid(module) == static_type) return;
  const std::string type = type_name(typeid(module));
  throw UsageError(
      fmt::format("a {} came as a pointer to its base {}, which hides the hooks it overrides; make it with "
                  "make_module<{}>(...), or pass "
                  "a shared_ptr<{}>",
                  type, type_name(static_type), type, type));
}

}  // namespace fulgur
