#pragma once

#include "fulgur.h"

namespace linear_probe {

struct LabelledFeatures {
  at::Tensor features;  // float [count, width]
  at::Tensor labels;    // int64 [count]; classes are numbered from 0
};

// How much of the labels a linear classifier gets out of the features: the fraction of `held_out` that a multinomial
// logistic regression on `train` classifies correctly. Features are standardised by the mean and deviation of `train`;
// the weights have a small L2 penalty, and L-BFGS finds them. Draws no random number.
double probe(const LabelledFeatures& train, const LabelledFeatures& held_out);

}  // namespace linear_probe
