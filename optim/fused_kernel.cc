#include "fulgur/optim/fused_kernel.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/fused_kernel.cc"
#include <hwy/foreach_target.h>
// Highway requires these after foreach_target.h:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "fulgur/base/vector_formats.h"

#ifndef FULGUR_OPTIM_FUSED_KERNEL_ONCE  // code that does not depend on the instruction set
#define FULGUR_OPTIM_FUSED_KERNEL_ONCE
namespace fulgur::optim::internal {

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

template <class D>
HWY_INLINE V<D> zero(D d) {
  return hn::Zero(d);
}
template <class D>
HWY_INLINE V<D> one(D d) {
  return hn::Set(d, Lane<D>(1));
}
template <class Vector>
HWY_INLINE Vector root(Vector v) {
  return hn::Sqrt(v);
}
template <class Vector>
HWY_INLINE Vector negated(Vector v) {
  return hn::Neg(v);
}
template <class Mask, class Vector>
HWY_INLINE Vector chosen(Mask mask, Vector yes, Vector no) {
  return hn::IfThenElse(mask, yes, no);
}

#define FULGUR_FORMULA HWY_INLINE
#include "fulgur/optim/update_formulas.h"
#undef FULGUR_FORMULA

// ---- Formats of gradients and copies.

using fulgur::HWY_NAMESPACE::load;
using fulgur::HWY_NAMESPACE::round_to;
using fulgur::HWY_NAMESPACE::U16;

// ---- The pass.

template <class Number, class Grad, class Copy>
struct Streams {
  Number* param;
  const Grad* grad;
  Number* states[kMaxStates];
  Copy* copy;  // null: no copy; may be the memory of `grad`
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

// How a copy is written.
template <class Step, class D>
struct Copying {
  Lookahead<Step, D> lookahead;
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
    const V<D> param = step(before, grad, states, streams.states);
    hn::StoreU(param, d, streams.param + i);
    for (size_t k = 0; k < Step::kNumStates; ++k) {
      if (streams.states[k]) hn::StoreU(states[k], d, streams.states[k] + i);
    }
    if (!streams.copy) continue;
    const V<D> ahead = copying.lookahead(before, param, grad, states, streams.states);
    store_copy(d, ahead, streams.copy + i, copying.stream);
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
  const Copying<Step, D> copying{{call.next_rule ? Ahead::by_next : without_next, steps.next,
                                  hn::Set(d, call.next_gradient), hn::Set(d, call.repeat)},
                                 call.stream_copy};
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

// While the upper parts of vector registers are in use, each instruction of older sets, for which most of libtorch is
// compiled, also depends on them. GCC 12 does not clear them at the end of a function that takes vectors, such as
// update(). Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, "Mixing AVX Code with SSE Code".
HWY_INLINE void clear_upper_parts() {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  _mm256_zeroupper();
#endif
}

void run_float(const KernelCall<float>& call) {
  with_rule(call);
  clear_upper_parts();
}
void run_double(const KernelCall<double>& call) {
  with_rule(call);
  clear_upper_parts();
}

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
