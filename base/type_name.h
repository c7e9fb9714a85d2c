#pragma once

#include <string>
#include <typeinfo>

namespace fulgur {

// The name of a type for messages: as in the source, without anonymous namespaces.
std::string type_name(const std::type_info& type);

// Without the namespaces before it: "Keeps<std::string>" for mine::Keeps<std::string>.
std::string short_type_name(const std::type_info& type);

}  // namespace fulgur
