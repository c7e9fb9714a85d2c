#include "fulgur/base/type_name.h"

#include <c10/util/Type.h>

#include <string_view>

namespace fulgur {

std::string type_name(const std::type_info& type) {
  constexpr std::string_view kNoName = "(anonymous namespace)::";
  std::string name = c10::demangle(type.name());
  for (size_t at = name.find(kNoName); at != std::string::npos; at = name.find(kNoName, at)) {
    name.erase(at, kNoName.size());
  }
  return name;
}

}  // namespace fulgur
