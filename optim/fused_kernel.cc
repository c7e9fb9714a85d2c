#include "fulgur/optim/fused_kernel.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/fused_kernel.cc"
#include <hwy/foreach_target.h>
// Highway requires these after foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#ifndef FULGUR_OPTIM_FUSED_KERNEL_ONCE  // code that does not depend on the instruction set
#define FULGUR_OPTIM_FUSED_KERNEL_ONCE
namespace fulgur::optim::internal {

struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

template <class R>
constexpr size_t kIndexOf = Rule(R{}).index();

constexpr size_t kLineBytes = 64;  // the step of the loop: a cache line of T

}  // namespace fulgur::optim::internal
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::optim::internal::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Only what Highway and the language itself define is called in here: an inline function of a library would be compiled
// for this instruction set, and the linker could choose it for the whole program.

template <class D>
using V = hn::Vec<D>;
template <class D>
using Lane = hn::TFromD<D>;

template <class D>
HWY_INLINE V<D> rounded(D d, double coefficient) {
  return hn::Set(d, static_cast<Lane<D>>(coefficient));
}

// a * b + c, rounded once.
template <class D>
HWY_INLINE V<D> fma(D d, V<D> a, V<D> b, V<D> c) {
#if HWY_NATIVE_FMA
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  HWY_ALIGN Lane<D> x[HWY_LANES(Lane<D>)], y[HWY_LANES(Lane<D>)], z[HWY_LANES(Lane<D>)];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    if constexpr (sizeof(Lane<D>) == sizeof(float)) {
      z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    } else {
      z[i] = __builtin_fma(x[i], y[i], z[i]);
    }
  }
  return hn::Load(d, z);
#endif
}

// mean + weight * (value - mean)
template <class D>
HWY_INLINE V<D> lerp(D d, V<D> mean, V<D> value, V<D> weight) {
  return fma(d, weight, value - mean, mean);
}

// mean + weight * (value^2 - mean); not below 0
template <class D>
HWY_INLINE V<D> lerp_square(D d, V<D> mean, V<D> value, V<D> weight) {
  return fma(d, weight, fma(d, value, value, hn::Neg(mean)), mean);
}

// ---- The rules: update_rules.h has their formulas. `present` is null for a state that is left out.

template <class D>
struct AdamStep {
  static constexpr size_t kNumStates = 2;
  D d;
  V<D> weight1, weight2, eps, step_size, inv_root, l2, decay;
  explicit AdamStep(const AdamRule& rule)
      : weight1(rounded(d, rule.one_minus_beta1)),
        weight2(rounded(d, rule.one_minus_beta2)),
        eps(rounded(d, rule.eps)),
        step_size(rounded(d, rule.step_size)),
        inv_root(rounded(d, rule.inv_root_bias_correction2)),
        l2(rounded(d, rule.l2)),
        decay(rounded(d, rule.decay)) {}
  HWY_INLINE V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    grad = fma(d, l2, param, grad);
    states[0] = lerp(d, states[0], grad, weight1);
    states[1] = lerp_square(d, states[1], grad, weight2);
    const V<D> root = fma(d, hn::Sqrt(states[1]), inv_root, eps);
    return param - fma(d, decay, param, step_size * (states[0] / root));
  }
};

template <class D>
struct SGDStep {
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> minus_lr, minus_loss, weight, l2;  // momentum is 1 + minus_loss, more exactly than it could be rounded
  bool nesterov;
  explicit SGDStep(const SGDRule& rule)
      : minus_lr(rounded(d, -rule.lr)),
        minus_loss(rounded(d, rule.momentum - 1.0)),
        weight(rounded(d, rule.one_minus_dampening)),
        l2(rounded(d, rule.l2)),
        nesterov(rule.nesterov) {}
  HWY_INLINE V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const* present) const {
    grad = fma(d, l2, param, grad);
    V<D> direction = grad;
    if (present[0]) {
      states[0] = fma(d, weight, grad, fma(d, minus_loss, states[0], states[0]));
      direction = nesterov ? fma(d, minus_loss, states[0], states[0] + grad) : states[0];
    }
    return fma(d, minus_lr, direction, param);
  }
};

template <class D>
struct AdagradStep {
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> minus_lr, eps, l2;
  explicit AdagradStep(const AdagradRule& rule)
      : minus_lr(rounded(d, -rule.lr)), eps(rounded(d, rule.eps)), l2(rounded(d, rule.l2)) {}
  HWY_INLINE V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    grad = fma(d, l2, param, grad);
    states[0] = fma(d, grad, grad, states[0]);
    return fma(d, minus_lr, grad / (hn::Sqrt(states[0]) + eps), param);
  }
};

template <class D>
struct RMSpropStep {
  static constexpr size_t kNumStates = 3;
  D d;
  V<D> minus_lr, weight, eps, momentum, l2;
  explicit RMSpropStep(const RMSpropRule& rule)
      : minus_lr(rounded(d, -rule.lr)),
        weight(rounded(d, rule.one_minus_alpha)),
        eps(rounded(d, rule.eps)),
        momentum(rounded(d, rule.momentum)),
        l2(rounded(d, rule.l2)) {}
  HWY_INLINE V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const* present) const {
    grad = fma(d, l2, param, grad);
    states[0] = lerp_square(d, states[0], grad, weight);
    V<D> variance = states[0];
    if (present[2]) {
      states[2] = lerp(d, states[2], grad, weight);
      variance = fma(d, hn::Neg(states[2]), states[2], variance);
      variance = hn::IfThenElse(variance < hn::Zero(d), hn::Zero(d), variance);  // below 0 by rounding only
    }
    V<D> direction = grad / (hn::Sqrt(variance) + eps);
    if (present[1]) direction = states[1] = fma(d, momentum, states[1], direction);
    return fma(d, minus_lr, direction, param);
  }
};

template <class D>
struct LionStep {
  static constexpr size_t kNumStates = 1;
  D d;
  V<D> lr, weight1, weight2, decay;
  explicit LionStep(const LionRule& rule)
      : lr(rounded(d, rule.lr)),
        weight1(rounded(d, rule.one_minus_beta1)),
        weight2(rounded(d, rule.one_minus_beta2)),
        decay(rounded(d, rule.decay)) {}
  HWY_INLINE V<D> operator()(V<D> param, V<D> grad, V<D>* states, Lane<D>* const*) const {
    const V<D> mean = lerp(d, states[0], grad, weight1);
    states[0] = lerp(d, states[0], grad, weight2);
    const V<D> zero = hn::Zero(d);
    V<D> step = mean * lr;  // the result if mean is 0 or NaN
    step = hn::IfThenElse(mean > zero, lr, step);
    step = hn::IfThenElse(mean < zero, hn::Neg(lr), step);
    return param - fma(d, decay, param, step);
  }
};

// ---- Formats of gradients and copies.

template <class D>
using U32 = hn::Rebind<uint32_t, D>;
template <class D>
using U16 = hn::Rebind<uint16_t, D>;

template <class D>
HWY_INLINE V<D> load(D d, const Lane<D>* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<U32<D>> load_bits(D, const uint16_t* from) {
  return hn::PromoteTo(U32<D>(), hn::LoadU(U16<D>(), from));
}

template <class D>
HWY_INLINE V<D> load(D d, const BF16* from) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, &from->bits)));
}

template <class D>
HWY_INLINE V<D> load(D d, const FP16* from) {
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
HWY_INLINE hn::Vec<U16<D>> round_to(D d, V<D> value, BF16) {
  const U32<D> u32;
  const auto bits = hn::BitCast(u32, value);
  const auto odd = hn::ShiftRight<16>(bits) & hn::Set(u32, 1);
  const auto quiet_nan = bits | hn::Set(u32, 0x400000);
  const auto rounded_up = bits + hn::Set(u32, 0x7fff) + odd;
  const auto is_nan = hn::RebindMask(u32, hn::IsNaN(value));
  return narrowed(d, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet_nan, rounded_up)));
}

template <class D>
HWY_INLINE hn::Vec<U16<D>> round_to(D d, V<D> value, FP16) {
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

// ---- The pass.

template <class Number, class Grad, class Copy>
struct Streams {
  Number* param;
  const Grad* grad;
  Number* states[kMaxStates];
  Copy* copy;  // null: no copy; may be the memory of `grad`
};

template <class D>
struct Scaling {
  D d;
  V<D> factor, clip_value;
  bool clips;
  HWY_INLINE V<D> operator()(V<D> grad) const {
    grad = grad * factor;
    if (!clips) return grad;
    grad = hn::IfThenElse(grad > clip_value, clip_value, grad);
    return hn::IfThenElse(grad < hn::Neg(clip_value), hn::Neg(clip_value), grad);
  }
};

template <class D, class Copy>
HWY_INLINE void store_copy(D d, V<D> param, Copy* to, bool stream) {
  if constexpr (hwy::IsSame<Copy, Lane<D>>()) {
    if (stream) {
      hn::Stream(param, d, to);
    } else {
      hn::StoreU(param, d, to);
    }
  } else {
    const auto bits = round_to(d, param, Copy{});
    if (stream) {
      hn::Stream(bits, U16<D>(), &to->bits);
    } else {
      hn::StoreU(bits, U16<D>(), &to->bits);
    }
  }
}

enum class Ahead { none, by_next, by_repeat };

// How a copy is written.
template <class Step, class D>
struct Copying {
  Ahead ahead;
  Step next;
  V<D> next_gradient, repeat;
  bool stream;
};

// Updates a line of elements that starts at `first`.
template <class Step, class D, class Number, class Grad, class Copy>
HWY_INLINE void update_line(const Step& step, const Scaling<D>& scaling, const Copying<Step, D>& copying,
                            const Streams<Number, Grad, Copy>& streams, size_t first) {
  const D d;
  for (size_t i = first; i < first + kLineBytes / sizeof(Number); i += hn::Lanes(d)) {
    V<D> states[Step::kNumStates];
    for (size_t k = 0; k < Step::kNumStates; ++k) {
      states[k] = streams.states[k] ? hn::LoadU(d, streams.states[k] + i) : hn::Zero(d);
    }
    const V<D> grad = scaling(load(d, streams.grad + i));
    const V<D> before = hn::LoadU(d, streams.param + i);
    V<D> param = step(before, grad, states, streams.states);
    hn::StoreU(param, d, streams.param + i);
    for (size_t k = 0; k < Step::kNumStates; ++k) {
      if (streams.states[k]) hn::StoreU(states[k], d, streams.states[k] + i);
    }
    if (!streams.copy) continue;
    if (copying.ahead == Ahead::by_next) {
      param = copying.next(param, grad * copying.next_gradient, states, streams.states);
    }
    if (copying.ahead == Ahead::by_repeat) param = fma(d, copying.repeat, param - before, param);
    store_copy(d, param, streams.copy + i, copying.stream);
  }
}

// The last elements, fewer than a line, go through a line that is padded with zeros.
template <class Step, class D, class Number, class Grad, class Copy>
HWY_INLINE void update_tail(const Step& step, const Scaling<D>& scaling, Copying<Step, D> copying,
                            const Streams<Number, Grad, Copy>& streams, size_t first, size_t count) {
  constexpr size_t kLine = kLineBytes / sizeof(Number);
  alignas(kLineBytes) Number param[kLine] = {}, states[kMaxStates][kLine] = {};
  alignas(kLineBytes) Grad grad[kLine] = {};
  alignas(kLineBytes) Copy copy[kLine] = {};
  Streams<Number, Grad, Copy> line{param, grad, {}, streams.copy ? copy : nullptr};
  memcpy(param, streams.param + first, count * sizeof(Number));
  memcpy(grad, streams.grad + first, count * sizeof(Grad));
  for (size_t k = 0; k < Step::kNumStates; ++k) {
    if (!streams.states[k]) continue;
    line.states[k] = states[k];
    memcpy(states[k], streams.states[k] + first, count * sizeof(Number));
  }
  copying.stream = false;
  update_line(step, scaling, copying, line, 0);
  memcpy(streams.param + first, param, count * sizeof(Number));
  for (size_t k = 0; k < Step::kNumStates; ++k) {
    if (streams.states[k]) memcpy(streams.states[k] + first, states[k], count * sizeof(Number));
  }
  if (streams.copy) memcpy(streams.copy + first, copy, count * sizeof(Copy));
}

// By value: behind references the compiler would load all coefficients and pointers again after each store.
template <class Step, class D, class Number, class Grad, class Copy>
HWY_NOINLINE void update(const Step step, const Scaling<D> scaling, const Copying<Step, D> copying,
                         const Streams<Number, Grad, Copy> streams, size_t num_elements) {
  constexpr size_t kLine = kLineBytes / sizeof(Number);
  size_t i = 0;  // no software prefetch: it made the loop slower by a tenth where memory is the limit
  for (; i + kLine <= num_elements; i += kLine) update_line(step, scaling, copying, streams, i);
  if (i < num_elements) update_tail(step, scaling, copying, streams, i, num_elements - i);
  if (copying.stream) hwy::FlushStream();
}

template <class Step>
struct Steps {
  Step last, next;
};

template <class Copy, class Grad, class Step, class Number>
HWY_INLINE void update_typed(const Steps<Step>& steps, const KernelCall<Number>& call) {
  using D = hn::CappedTag<Number, kLineBytes / sizeof(Number)>;  // wider vectors (SVE) would overrun a line
  const D d;
  const Scaling<D> scaling{d, hn::Set(d, call.factor), hn::Set(d, call.clip_value), call.clip_value < __builtin_inf()};
  const Ahead without_next = call.repeat != 0 ? Ahead::by_repeat : Ahead::none;
  const Copying<Step, D> copying{call.next_rule ? Ahead::by_next : without_next, steps.next,
                                 hn::Set(d, call.next_gradient), hn::Set(d, call.repeat), call.stream_copy};
  Streams<Number, Grad, Copy> streams{
      call.param, static_cast<const Grad*>(call.grad), {}, static_cast<Copy*>(call.copy_out)};
  for (size_t k = 0; k < kMaxStates; ++k) streams.states[k] = call.states[k];
  update(steps.last, scaling, copying, streams, call.num_elements);
}

template <class Grad, class Step, class Number>
HWY_INLINE void with_copy_type(const Steps<Step>& steps, const KernelCall<Number>& call) {
  if (call.copy_type == c10::ScalarType::Half) {
    update_typed<FP16, Grad>(steps, call);
  } else {
    update_typed<BF16, Grad>(steps, call);
  }
}

template <class Step>
HWY_INLINE void with_types(const Steps<Step>& steps, const KernelCall<float>& call) {
  switch (call.grad_type) {
    case c10::ScalarType::BFloat16:
      return with_copy_type<BF16>(steps, call);
    case c10::ScalarType::Half:
      return with_copy_type<FP16>(steps, call);
    default:
      if (call.copy_type == c10::ScalarType::Float) return update_typed<float, float>(steps, call);
      return with_copy_type<float>(steps, call);
  }
}

template <class Step>
HWY_INLINE void with_types(const Steps<Step>& steps, const KernelCall<double>& call) {
  update_typed<double, double>(steps, call);
}

template <template <class> class Step, class R, class Number>
HWY_INLINE void with_step(const KernelCall<Number>& call) {
  using D = hn::CappedTag<Number, kLineBytes / sizeof(Number)>;  // wider vectors (SVE) would overrun a line
  const R& rule = *static_cast<const R*>(call.rule);
  const R& next = call.next_rule ? *static_cast<const R*>(call.next_rule) : rule;
  with_types(Steps<Step<D>>{Step<D>(rule), Step<D>(next)}, call);
}

template <class Number>
HWY_INLINE void with_rule(const KernelCall<Number>& call) {
  switch (call.rule_index) {
    case kIndexOf<AdamRule>:
      return with_step<AdamStep, AdamRule>(call);
    case kIndexOf<SGDRule>:
      return with_step<SGDStep, SGDRule>(call);
    case kIndexOf<AdagradRule>:
      return with_step<AdagradStep, AdagradRule>(call);
    case kIndexOf<RMSpropRule>:
      return with_step<RMSpropStep, RMSpropRule>(call);
    case kIndexOf<LionRule>:
      return with_step<LionStep, LionRule>(call);
  }
}

void run_float(const KernelCall<float>& call) { with_rule(call); }
void run_double(const KernelCall<double>& call) { with_rule(call); }

}  // namespace fulgur::optim::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur::optim::internal {

HWY_EXPORT(run_float);
HWY_EXPORT(run_double);

void run_kernel(const KernelCall<float>& call) { HWY_DYNAMIC_DISPATCH(run_float)(call); }
void run_kernel(const KernelCall<double>& call) { HWY_DYNAMIC_DISPATCH(run_double)(call); }

}  // namespace fulgur::optim::internal
#endif
