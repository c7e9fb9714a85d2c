#pragma once

#include <string>
#include <vector>

namespace fulgur {

// The first ten of the items, and how many more there are: "a, b and 7 more".
std::string listed(std::vector<std::string> items);

}  // namespace fulgur
