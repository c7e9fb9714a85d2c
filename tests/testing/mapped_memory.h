#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace fulgur::testing {

// How many times memory that ranks share, or let each other map, is mapped in this process.
inline int64_t num_mapped_regions() {
  int64_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("/memfd:fulgur") != std::string::npos ? 1 : 0;
  return count;
}

}  // namespace fulgur::testing
