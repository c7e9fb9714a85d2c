#pragma once

#include <string>

namespace fulgur {

// docs/options.md: all options of fulgur, from their descriptions. //tools:options_page prints it.
std::string options_page();

}  // namespace fulgur
