#pragma once

#include "fulgur.h"

namespace swav {

// The swapped prediction: the code of each large crop is predicted from every other crop of the same image.
//   codes: [num_large_crops, batch_size, num_prototypes], rows of which add up to 1.
//   scores: of all crops, the large ones first, [num_crops, batch_size, num_prototypes].
// Returns the mean cross entropy over pairs of crops and images. Source: Caron et al. 2020, arXiv:2006.09882,
// equations 1 and 2.
at::Tensor swapped_prediction_loss(const at::Tensor& codes, const at::Tensor& scores, double temperature);

// NT-Xent: each of two views is to be more similar to the other view of its image than to all other views.
//   first, second: of length 1, [batch_size, size].
// Returns the mean cross entropy over the 2 * batch_size views. Source: Chen et al. 2020, arXiv:2002.05709, equation 1.
at::Tensor nt_xent_loss(const at::Tensor& first, const at::Tensor& second, double temperature);

}  // namespace swav
