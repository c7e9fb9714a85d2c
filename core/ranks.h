#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/core/metric.h"

namespace fulgur {

enum class Reduction { mean, sum, min, max };

// Collective operations over all ranks of a run. Every rank calls the same members in the same order.
class Ranks {
 public:
  virtual ~Ranks() = default;

  virtual int64_t rank() const = 0;
  virtual int64_t world_size() const = 0;

  // Combines values element by element, in place; every rank passes the same number of values.
  virtual void all_reduce(std::span<double> values, Reduction reduction) = 0;

  // The states of one metric over all ranks; see combined().
  virtual MetricStates combine(MetricStates states) = 0;

  // The texts of all ranks, by rank.
  virtual std::vector<std::string> all_gather(std::string_view text) = 0;
};

// Whether `mine` is true on any rank.
inline bool any_rank(Ranks& ranks, bool mine) {
  double any = mine ? 1.0 : 0.0;
  ranks.all_reduce({&any, 1}, Reduction::max);
  return any != 0.0;
}

}  // namespace fulgur
