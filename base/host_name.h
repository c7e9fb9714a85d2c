#pragma once

#include <string>

namespace fulgur {

// The name that this machine gives itself (gethostname); empty if it has none.
std::string host_name();

}  // namespace fulgur
