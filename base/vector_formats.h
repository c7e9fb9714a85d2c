// Formats of numbers for kernels that Highway compiles once for each instruction set. Include it after
// hwy/foreach_target.h and hwy/highway.h: like theirs, its functions are there once for each instruction set, in
// fulgur::HWY_NAMESPACE.
//   load(d, from)                  numbers in a vector of fp32 or, from fp64, fp64
//   round_to(d, value, BF16{})     the bits of fp32 numbers in 16 bits, rounded to the nearest, ties to even
#include <cstdint>

#ifndef FULGUR_BASE_VECTOR_FORMATS_ONCE  // code that does not depend on the instruction set
#define FULGUR_BASE_VECTOR_FORMATS_ONCE
namespace fulgur {

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

}  // namespace fulgur
#endif

#if defined(FULGUR_BASE_VECTOR_FORMATS) == defined(HWY_TARGET_TOGGLE)  // Highway's guard: once for each set
#ifdef FULGUR_BASE_VECTOR_FORMATS
#undef FULGUR_BASE_VECTOR_FORMATS
#else
#define FULGUR_BASE_VECTOR_FORMATS
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using U32 = hn::Rebind<uint32_t, D>;
template <class D>
using U16 = hn::Rebind<uint16_t, D>;

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const hn::TFromD<D>* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<U32<D>> load_bits(D, const uint16_t* from) {
  return hn::PromoteTo(U32<D>(), hn::LoadU(U16<D>(), from));
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const BF16* from) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, &from->bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const FP16* from) {
  const U32<D> u32;
  const auto half = load_bits(d, &from->bits);
  const auto magnitude = hn::ShiftLeft<13>(half & hn::Set(u32, 0x7fff));
  const auto exponent = magnitude & hn::Set(u32, 0x7c00u << 13);
  const auto rebiased = magnitude + hn::Set(u32, (127u - 15u) << 23);
  const auto inf_or_nan = rebiased + hn::Set(u32, (128u - 16u) << 23);
  const auto smallest_normal = hn::Set(u32, 113u << 23);
  const auto subnormal =
      hn::BitCast(u32, hn::BitCast(d, rebiased + hn::Set(u32, 1u << 23)) - hn::BitCast(d, smallest_normal));  // exact
  auto bits = hn::IfThenElse(exponent == hn::Set(u32, 0x7c00u << 13), inf_or_nan, rebiased);
  bits = hn::IfThenElse(exponent == hn::Zero(u32), subnormal, bits);
  return hn::BitCast(d, bits | hn::ShiftLeft<16>(half & hn::Set(u32, 0x8000)));
}

// The 16 low bits of each lane.
template <class D>
HWY_INLINE hn::Vec<U16<D>> narrowed(D, hn::Vec<U32<D>> bits) {
  return hn::DemoteTo(U16<D>(), hn::BitCast(hn::Rebind<int32_t, D>(), bits));
}

template <class D>
HWY_INLINE hn::Vec<U16<D>> round_to(D d, hn::Vec<D> value, BF16) {
  const U32<D> u32;
  const auto bits = hn::BitCast(u32, value);
  const auto odd = hn::ShiftRight<16>(bits) & hn::Set(u32, 1);
  const auto quiet_nan = bits | hn::Set(u32, 0x400000);
  const auto rounded_up = bits + hn::Set(u32, 0x7fff) + odd;
  const auto is_nan = hn::RebindMask(u32, hn::IsNaN(value));
  return narrowed(d, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet_nan, rounded_up)));
}

template <class D>
HWY_INLINE hn::Vec<U16<D>> round_to(D d, hn::Vec<D> value, FP16) {
  const U32<D> u32;
  const auto bits = hn::BitCast(u32, value);
  const auto magnitude = bits & hn::Set(u32, 0x7fffffff);
  const auto odd = hn::ShiftRight<13>(magnitude) & hn::Set(u32, 1);
  const auto normal = hn::ShiftRight<13>(magnitude - hn::Set(u32, 112u << 23) + hn::Set(u32, 0xfff) + odd);
  const auto magic = hn::Set(u32, 126u << 23);  // 0.5: the unit of its last place is half's smallest subnormal
  const auto subnormal = hn::BitCast(u32, hn::BitCast(d, magnitude) + hn::BitCast(d, magic)) - magic;
  const auto quiet_nan = hn::ShiftRight<13>(magnitude & hn::Set(u32, 0x7fffff)) | hn::Set(u32, 0x7e00);
  auto half = hn::IfThenElse(magnitude < hn::Set(u32, 113u << 23), subnormal, normal);
  half = hn::IfThenElse(magnitude > hn::Set(u32, (143u << 23) - 1), hn::Set(u32, 0x7c00), half);  // 65536 and more
  half = hn::IfThenElse(magnitude > hn::Set(u32, 0x7f800000), quiet_nan, half);
  return narrowed(d, half | (hn::ShiftRight<16>(bits) & hn::Set(u32, 0x8000)));
}

}  // namespace fulgur::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
