#pragma once

#include <cstdint>
#include <functional>

#include "fulgur.h"

namespace swav {

// Returns the sum of a tensor over all ranks; every rank calls it with a tensor of the same shape.
using SumOverRanks = std::function<at::Tensor(const at::Tensor&)>;

struct SinkhornOptions {
  double epsilon = 0.05;       // above 0; weight of the entropy: a larger one makes codes softer
  int64_t num_iterations = 3;  // normalisations of prototypes and samples
  void describe(fulgur::FieldVisitor& visit);
};

// Assigns samples to prototypes so that scores are high and all prototypes are used alike: the optimal transport of
// Sinkhorn and Knopp with an entropy, stopped after a few iterations. The samples are those of all ranks together.
//   scores: similarities of this rank's samples, between -1 and 1, [batch_size, num_prototypes].
// Returns the codes of this rank's samples, fp32 or fp64, [batch_size, num_prototypes], without a graph: each row adds
// up to 1, and, as iterations grow, each column over all ranks to the number of samples divided by that of prototypes.
// Source: Caron et al. 2020, arXiv:2006.09882, section 3.1; Cuturi 2013, arXiv:1306.0895.
at::Tensor sinkhorn(const at::Tensor& scores, const SinkhornOptions& options, const SumOverRanks& sum_over_ranks);

}  // namespace swav
