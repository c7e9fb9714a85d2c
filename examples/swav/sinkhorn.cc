#include "examples/swav/sinkhorn.h"

namespace swav {

void SinkhornOptions::describe(fulgur::FieldVisitor& visit) {
  visit({.name = "epsilon", .help = "weight of the entropy: a larger one makes codes softer", .min = 0.01}, &epsilon);
  visit({.name = "num_iterations", .help = "normalisations of prototypes and samples", .min = 1}, &num_iterations);
}

// The article also divides by the numbers of prototypes and samples. These factors are left out: the normalisation of
// each sample removes them.
at::Tensor sinkhorn(const at::Tensor& scores, const SinkhornOptions& options, const SumOverRanks& sum_over_ranks) {
  const at::NoGradGuard no_grad;
  const auto dtype = at::promote_types(scores.scalar_type(), at::kFloat);
  auto codes = at::exp(scores.to(dtype) / options.epsilon);
  for (int64_t i = 0; i < options.num_iterations; ++i) {
    codes = codes / sum_over_ranks(codes.sum(0));
    codes = codes / codes.sum(1, /*keepdim=*/true);
  }
  return codes;
}

}  // namespace swav
