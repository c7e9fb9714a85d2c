#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <limits>

#include "optim/update_rules.h"

// The update of an element-wise optimizer as one pass over CPU memory: gradients in, parameters and state in place and,
// if asked for, a 16-bit copy of the parameters out.
//
//   AdamRule rule{.step_size = ..., .decay = ...};
//   fused_update(rule, Slice<float>{.param = p, .grad = g, .states = {m, v}, .num_elements = n});
//
// Arithmetic: with the instructions of this CPU (AVX-512, AVX2, NEON, else scalar), chosen at run time by Highway. The
// same bits come out for all of them, for any number of threads and however a run of elements is cut into slices (which
// NaN a NaN is aside): products are fused into sums everywhere, roots and quotients are IEEE's, a tail goes through the
// same code as the rest. Coefficients are doubles and rounded once.
// Threads: static chunks over at::get_num_threads() of torch's own pool; small slices stay on the calling thread.
namespace fulgur::optim {

// What a gradient, and a copy, of fp32 parameters may be besides.
constexpr bool is_16_bit(c10::ScalarType type) {
  return type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half;
}

// In which the state of such parameters is, and sums of their gradients.
constexpr c10::ScalarType widened(c10::ScalarType type) { return is_16_bit(type) ? at::kFloat : type; }

// A run of elements: T is float or double. Memory need not be aligned and nothing outside of it is touched; the runs
// must not overlap.
template <class T>
struct Slice {
  T* param = nullptr;                                              // in and, but for param_out, out
  T* param_out = nullptr;                                          // the new parameters go there, if it is set
  const void* grad = nullptr;                                      // in
  c10::ScalarType grad_type = c10::CppTypeToScalarType<T>::value;  // T; or, for T = float, kBFloat16 or kHalf
  std::array<T*, kMaxStates> states{};                             // in and out, in the order of the rule
  void* copy_out = nullptr;                                        // the new parameters, rounded to nearest even
  c10::ScalarType copy_type = c10::ScalarType::BFloat16;           // or kHalf; of copy_out, for T = float only
  int64_t num_elements = 0;
};

// What becomes of a gradient before the rule sees it; a NaN stays one.
struct GradientScaling {
  double factor = 1.0;
  double clip_value = std::numeric_limits<double>::infinity();  // after the factor: cut to [-clip_value, clip_value]
};

// Updates the slice. Throws c10::ValueError if a pointer that the rule needs is null or a type is not one of the above.
void fused_update(const Rule& rule, const Slice<float>& slice, const GradientScaling& scaling = {});
void fused_update(const Rule& rule, const Slice<double>& slice, const GradientScaling& scaling = {});

}  // namespace fulgur::optim
