#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <limits>

#include "fulgur/optim/update_rules.h"

// The update of an element-wise optimizer as one pass over CPU memory: gradients in, parameters and state in place
// and, if requested, a copy of the parameters out, which may be of 16 bits, or ahead by the update that is expected
// next.
//
//   AdamRule rule{.step_size = ..., .decay = ...};
//   fused_update(rule, Slice<float>{.param = p, .grad = g, .states = {m, v}, .num_elements = n});
//
// Arithmetic: with the instructions of this CPU (AVX-512, AVX2, NEON, otherwise scalar), chosen at run time by
// Highway. Results have the same bits for all of them, for any number of threads and however a run of elements is cut
// into slices (except which NaN a NaN is): products are fused into sums everywhere, roots and quotients are IEEE's, a
// tail goes through the same code as the rest. Coefficients are doubles and rounded once.
// Threads: static chunks over at::get_num_threads() of torch's own pool; small slices stay on the calling thread.
namespace fulgur::optim {

// The 16-bit types, which gradients and copies of fp32 parameters may have, too.
constexpr bool is_16_bit(c10::ScalarType type) {
  return type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half;
}

// The type of a parameter's state, and of sums of its gradients: fp32 for 16-bit types.
constexpr c10::ScalarType widened(c10::ScalarType type) { return is_16_bit(type) ? at::kFloat : type; }

// A run of elements: T is float or double. Memory need not be aligned and nothing outside of it is touched; the runs
// must not overlap, but the copy may take the place of the gradient if both are of T.
template <class T>
struct Slice {
  T* param = nullptr;                                              // input and output
  const void* grad = nullptr;                                      // input
  c10::ScalarType grad_type = c10::CppTypeToScalarType<T>::value;  // T; or, for T = float, kBFloat16 or kHalf
  std::array<T*, kMaxStates> states{};                             // input and output, in the order of the rule
  void* copy_out = nullptr;                                        // new parameters, rounded to nearest even, or null
  c10::ScalarType copy_type = c10::CppTypeToScalarType<T>::value;  // T, if the gradient is of T; for float also 16-bit
  int64_t num_elements = 0;
};

// How a gradient is changed before the rule uses it; a NaN stays a NaN.
struct GradientScaling {
  double factor = 1.0;
  double clip_value = std::numeric_limits<double>::infinity();  // after the factor: clip to [-clip_value, clip_value]
};

// Updates the slice; its copy, if any, is ahead by `prediction`. Throws c10::ValueError if a pointer that the rule
// needs is null, a type is not one of the above, or the prediction is by another rule.
void fused_update(const Rule& rule, const Slice<float>& slice, const GradientScaling& scaling = {},
                  const Prediction& prediction = {});
void fused_update(const Rule& rule, const Slice<double>& slice, const GradientScaling& scaling = {},
                  const Prediction& prediction = {});

}  // namespace fulgur::optim
