#pragma once

#include <c10/util/BFloat16.h>

#include <cstddef>

namespace fulgur {

// The sum of the squares of `count` numbers, each squared and added in fp64. The order of additions is the same with
// every instruction set, and so are the bits of the sum. Runs on the calling thread.
double sum_of_squares(const float* numbers, size_t count);
double sum_of_squares(const c10::BFloat16* numbers, size_t count);
double sum_of_squares(const double* numbers, size_t count);

}  // namespace fulgur
