#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fulgur::bench {

// One way to do a job. `run` does it once, for `units` units of work (steps, elements, bytes).
struct Contender {
  std::string name;
  std::function<void()> run;
  double bytes_per_unit = 0.0;  // that cross the memory bus; above 0: GB/s are printed, too
};

// Runs the contenders in turn (A-B-A-B), once to warm up and then `rounds` times, so that noise of the machine meets
// all alike. Prints for each the median time per unit and its ratio to the first one: the median over the rounds of the
// two times in the same round. Returns those ratios; the first is 1.
std::vector<double> side_by_side(const std::string& unit, double units, const std::vector<Contender>& contenders,
                                 int rounds = 15);

}  // namespace fulgur::bench
