#pragma once

#include <span>

#include "core/metric.h"

namespace fulgur {

enum class Reduction { mean, sum, min, max };

// All ranks of a run, for values that become one. Every rank calls the same members in the same order.
class Ranks {
 public:
  virtual ~Ranks() = default;

  // Combines values element by element, in place, by sum, min or max; every rank gives as many.
  virtual void all_reduce(std::span<double> values, Reduction reduction) = 0;

  // The states of one metric over all ranks; see combined().
  virtual MetricStates combine(MetricStates states) = 0;
};

}  // namespace fulgur
