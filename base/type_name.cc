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

std::string short_type_name(const std::type_info& type) {
  const std::string name = c10::demangle(type.name());
  size_t end = name.size();
  int depth = 0;
  do {
    --end;
    if (name[end] == '>') ++depth;
    if (name[end] == '<') --depth;
  } while (end > 0 && depth > 0);
  const size_t colons = name.rfind("::", end);
  return colons == std::string::npos ? name : name.substr(colons + 2);
}

}  // namespace fulgur
