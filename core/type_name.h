#pragma once

#include <string>
#include <typeinfo>

namespace fulgur {

// A type as messages name it: as in the source, without the namespaces that have no name.
std::string type_name(const std::type_info& type);

}  // namespace fulgur
