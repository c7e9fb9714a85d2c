#include "bench/process_memory.h"

#include <fstream>
#include <string>

namespace fulgur::bench {
namespace {

// From a file of /proc/self that has a line "<name> <kB> kB".
double read_mb(const char* file, std::string_view name) {
  std::ifstream lines(std::string("/proc/self/") + file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name)) return std::stod(line.substr(name.size())) * 1024 / 1e6;
  }
  return 0;
}

}  // namespace

double resident_mb() { return read_mb("status", "VmRSS:"); }
double peak_mb() { return read_mb("status", "VmHWM:"); }
double proportional_mb() { return read_mb("smaps_rollup", "Pss:"); }

void forget_peak() { std::ofstream("/proc/self/clear_refs") << '5'; }

}  // namespace fulgur::bench
