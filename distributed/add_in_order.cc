#include "fulgur/distributed/add_in_order.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "distributed/add_in_order.cc"
#include <hwy/foreach_target.h>
// Highway requires these after foreach_target.h:
#include <hwy/highway.h>

#include "fulgur/base/vector_formats.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::HWY_NAMESPACE {

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> value, hn::TFromD<D>* to) {
  hn::StoreU(value, d, to);
}
template <class D, class Format>
  requires requires(Format format) { format.bits; }
HWY_INLINE void store(D d, hn::Vec<D> value, Format* to) {
  hn::StoreU(round_to(d, value, Format{}), U16<D>(), &to->bits);
}

// Adds from element `i` on, for as long as four vectors fit; four sums at a time, so that an addition does not wait for
// the one before it. Returns the first element that is left.
template <class D, class T>
HWY_INLINE size_t add_fours(D d, T* out, const T* const* rows, size_t num_rows, size_t i, size_t num_elements) {
  const size_t lanes = hn::Lanes(d);
  for (; i + 4 * lanes <= num_elements; i += 4 * lanes) {
    const T* const first = rows[0] + i;
    auto sum0 = load(d, first), sum1 = load(d, first + lanes);
    auto sum2 = load(d, first + 2 * lanes), sum3 = load(d, first + 3 * lanes);
    for (size_t row = 1; row < num_rows; ++row) {
      const T* const next = rows[row] + i;
      sum0 = hn::Add(sum0, load(d, next));
      sum1 = hn::Add(sum1, load(d, next + lanes));
      sum2 = hn::Add(sum2, load(d, next + 2 * lanes));
      sum3 = hn::Add(sum3, load(d, next + 3 * lanes));
    }
    store(d, sum0, out + i);
    store(d, sum1, out + i + lanes);
    store(d, sum2, out + i + 2 * lanes);
    store(d, sum3, out + i + 3 * lanes);
  }
  return i;
}

template <class Number, class T>
HWY_INLINE void add(T* out, const T* const* rows, size_t num_rows, size_t num_elements) {
  size_t i = add_fours(hn::ScalableTag<Number>(), out, rows, num_rows, 0, num_elements);
  const hn::CappedTag<Number, 1> one;
  for (; i < num_elements; ++i) {
    auto sum = load(one, rows[0] + i);
    for (size_t row = 1; row < num_rows; ++row) sum = hn::Add(sum, load(one, rows[row] + i));
    store(one, sum, out + i);
  }
}

void add_floats(float* out, const float* const* rows, size_t num_rows, size_t num_elements) {
  add<float>(out, rows, num_rows, num_elements);
}
void add_doubles(double* out, const double* const* rows, size_t num_rows, size_t num_elements) {
  add<double>(out, rows, num_rows, num_elements);
}
void add_bf16(BF16* out, const BF16* const* rows, size_t num_rows, size_t num_elements) {
  add<float>(out, rows, num_rows, num_elements);
}
void add_fp16(FP16* out, const FP16* const* rows, size_t num_rows, size_t num_elements) {
  add<float>(out, rows, num_rows, num_elements);
}

}  // namespace fulgur::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur {

HWY_EXPORT(add_floats);
HWY_EXPORT(add_doubles);
HWY_EXPORT(add_bf16);
HWY_EXPORT(add_fp16);

void add_in_order(float* out, const float* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_floats)(out, rows, num_rows, num_elements);
}
void add_in_order(double* out, const double* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_doubles)(out, rows, num_rows, num_elements);
}
void add_in_order(c10::BFloat16* out, const c10::BFloat16* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_bf16)
  (reinterpret_cast<BF16*>(out), reinterpret_cast<const BF16* const*>(rows), num_rows, num_elements);
}
void add_in_order(c10::Half* out, const c10::Half* const* rows, size_t num_rows, size_t num_elements) {
  HWY_DYNAMIC_DISPATCH(add_fp16)
  (reinterpret_cast<FP16*>(out), reinterpret_cast<const FP16* const*>(rows), num_rows, num_elements);
}

}  // namespace fulgur
#endif
