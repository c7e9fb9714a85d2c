#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>

namespace fulgur {

// out[i] = rows[0][i] + rows[1][i] + ..., added in this order, in one pass over all rows. 16-bit numbers are added in
// fp32, and the sum is rounded once. `out` may be one of the rows. Runs on the calling thread. Needs at least one row.
void add_in_order(float* out, const float* const* rows, size_t num_rows, size_t num_elements);
void add_in_order(double* out, const double* const* rows, size_t num_rows, size_t num_elements);
void add_in_order(c10::BFloat16* out, const c10::BFloat16* const* rows, size_t num_rows, size_t num_elements);
void add_in_order(c10::Half* out, const c10::Half* const* rows, size_t num_rows, size_t num_elements);

}  // namespace fulgur
