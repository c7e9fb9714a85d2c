#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fulgur::bench {

// One way to do a job. `run` does it once, for `units` units of work (steps, elements, bytes).
struct Contender {
  std::string name;
  std::function<void()> run;
  double bytes_per_unit = 0.0;  // traffic on the memory bus; above 0: GB/s are printed, too
};

struct Timing {
  double seconds;              // per unit: the median over the rounds
  double ratio;                // to the first contender: the median of the ratios within each round
  std::vector<double> rounds;  // seconds per unit in each round
};

// Runs the contenders in turn (A-B-A-B), once to warm up and then `rounds` times, so that noise of the machine
// affects all alike. Prints and returns the timing of each.
std::vector<Timing> side_by_side(const std::string& unit, double units, const std::vector<Contender>& contenders,
                                 int rounds = 15);

// The ratios of one contender's time to another's within each round.
struct Ratio {
  double median, least, most;
};
Ratio ratio_of(const Timing& timing, const Timing& base);

// Makes the compiler compute `value`, which nothing reads afterwards.
inline void do_not_optimize_away(int64_t value) { asm volatile("" : : "r"(value)); }

}  // namespace fulgur::bench
