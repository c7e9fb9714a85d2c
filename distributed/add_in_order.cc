#include "fulgur/distributed/add_in_order.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "distributed/add_in_order.cc"
#include <hwy/foreach_target.h>
// Highway requires this after foreach_target.h:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Four sums at a time, so that an addition does not wait for the one before it.
template <class T>
HWY_INLINE void add(T* out, const T* const* rows, size_t num_rows, size_t num_elements) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 4 * lanes <= num_elements; i += 4 * lanes) {
    const T* const first = rows[0] + i;
    auto sum0 = hn::LoadU(d, first), sum1 = hn::LoadU(d, first + lanes);
    auto sum2 = hn::LoadU(d, first + 2 * lanes), sum3 = hn::LoadU(d, first + 3 * lanes);
    for (size_t row = 1; row < num_rows; ++row) {
      const T* const next = rows[row] + i;
      sum0 = hn::Add(sum0, hn::LoadU(d, next));
      sum1 = hn::Add(sum1, hn::LoadU(d, next + lanes));
      sum2 = hn::Add(sum2, hn::LoadU(d, next + 2 * lanes));
      sum3 = hn::Add(sum3, hn::LoadU(d, next + 3 * lanes));
    }
    hn::StoreU(sum0, d, out + i);
    hn::StoreU(sum1, d, out + i + lanes);
    hn::StoreU(sum2, d, out + i + 2 * lanes);
    hn::StoreU(sum3, d, out + i + 3 * lanes);
  }
  for (; i < num_elements; ++i) {
    T sum = rows[0][i];
    for (size_t row = 1; row < num_rows; ++row) sum += rows[row][i];
    out[i] = sum;
  }
}

void add_floats(float* out, const float* const* rows, size_t num_rows, size_t num_elements) {
  add(out, rows, num_rows, num_elements);
}
void add_doubles(double* out, const double* const* rows, size_t num_rows, size_t num_elements) {
  add(out, rows, num_rows, num_elements);
}

}  // namespace fulgur::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur {

HWY_EXPORT(add_floats);
HWY_EXPORT(add_doubles);

void add_in_order(float* out, const float* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_floats)(out, rows, num_rows, num_elements);
}
void add_in_order(double* out, const double* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_doubles)(out, rows, num_rows, num_elements);
}

}  // namespace fulgur
#endif
