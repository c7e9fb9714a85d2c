#include "fulgur/core/sum_of_squares.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/sum_of_squares.cc"
#include <hwy/foreach_target.h>
// Highway requires this after foreach_target.h:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Only what Highway and the language itself define is called in here: an inline function of a library would be compiled
// for this instruction set, and the linker could choose it for the whole program.

// Number i is added to sum i % kNumSums: enough sums that additions need not wait for each other.
constexpr size_t kNumSums = 32;

using Doubles = hn::CappedTag<double, 8>;
using Floats = hn::Rebind<float, Doubles>;
using Bits = hn::Rebind<uint32_t, Doubles>;
using BrainBits = hn::Rebind<uint16_t, Doubles>;

HWY_INLINE hn::Vec<Doubles> load(const double* from) { return hn::LoadU(Doubles(), from); }
HWY_INLINE hn::Vec<Doubles> load(const float* from) { return hn::PromoteTo(Doubles(), hn::LoadU(Floats(), from)); }
HWY_INLINE hn::Vec<Doubles> load(const uint16_t* from) {  // bfloat16: the upper half of a float
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(Bits(), hn::LoadU(BrainBits(), from)));
  return hn::PromoteTo(Doubles(), hn::BitCast(Floats(), bits));
}

template <class Number>
HWY_INLINE void add_squares(const Number* numbers, size_t num_rounds, double* sums) {
  constexpr size_t kLanes = hn::MaxLanes(Doubles());
  hn::Vec<Doubles> own[kNumSums / kLanes];
  for (size_t v = 0; v < kNumSums / kLanes; ++v) own[v] = hn::Zero(Doubles());
  for (size_t round = 0; round < num_rounds; ++round, numbers += kNumSums) {
    HWY_UNROLL(kNumSums / kLanes)
    for (size_t v = 0; v < kNumSums / kLanes; ++v) {
      const auto number = load(numbers + v * kLanes);
      own[v] = hn::Add(own[v], hn::Mul(number, number));
    }
  }
  for (size_t v = 0; v < kNumSums / kLanes; ++v) hn::StoreU(own[v], Doubles(), sums + v * kLanes);
}

template <class Number>
HWY_INLINE double sum_of_squares(const Number* numbers, size_t count) {
  double sums[kNumSums];
  const size_t in_rounds = count / kNumSums * kNumSums;
  add_squares(numbers, count / kNumSums, sums);
  Number rest[kNumSums] = {};
  double of_rest[kNumSums];
  for (size_t i = in_rounds; i < count; ++i) rest[i - in_rounds] = numbers[i];
  add_squares(rest, 1, of_rest);
  for (size_t i = 0; i < kNumSums; ++i) sums[i] += of_rest[i];
  for (size_t half = kNumSums / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

double of_floats(const float* numbers, size_t count) { return sum_of_squares(numbers, count); }
double of_doubles(const double* numbers, size_t count) { return sum_of_squares(numbers, count); }
double of_bfloat16s(const uint16_t* bits, size_t count) { return sum_of_squares(bits, count); }

}  // namespace fulgur::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur {

HWY_EXPORT(of_floats);
HWY_EXPORT(of_doubles);
HWY_EXPORT(of_bfloat16s);

double sum_of_squares(const float* numbers, size_t count) { return HWY_DYNAMIC_DISPATCH(of_floats)(numbers, count); }
double sum_of_squares(const double* numbers, size_t count) { return HWY_DYNAMIC_DISPATCH(of_doubles)(numbers, count); }
double sum_of_squares(const c10::BFloat16* numbers, size_t count) {
  return HWY_DYNAMIC_DISPATCH(of_bfloat16s)(&numbers->x, count);
}

}  // namespace fulgur
#endif
