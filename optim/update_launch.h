#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "fulgur/base/device_code.h"
#include "fulgur/optim/update_rules.h"

// The update of an element-wise optimizer on a GPU: one launch updates many tensors, whose addresses are in the
// kernel's argument. optim/fused_kernel.cc is the same for CPUs, and has the same bits.
namespace fulgur::optim::gpu {

// ---- The arithmetic of update_formulas.h with scalars.

struct Scalar {};  // the tag for fp32
template <class D>
using V = float;
template <class D>
using Lane = float;

inline float rounded(Scalar, double coefficient) { return static_cast<float>(coefficient); }
FULGUR_DEVICE_CODE float zero(Scalar) { return 0.0F; }
FULGUR_DEVICE_CODE float one(Scalar) { return 1.0F; }
FULGUR_DEVICE_CODE float fma(Scalar, float a, float b, float c) { return ::fmaf(a, b, c); }
FULGUR_DEVICE_CODE float root(float v) { return ::sqrtf(v); }
FULGUR_DEVICE_CODE float negated(float v) { return -v; }
FULGUR_DEVICE_CODE float chosen(bool condition, float yes, float no) { return condition ? yes : no; }

#define FULGUR_FORMULA FULGUR_DEVICE_CODE
#include "fulgur/optim/update_formulas.h"
#undef FULGUR_FORMULA

// ---- What a launch is told.

using device_code::Format;

constexpr uint32_t kMaxTensors = 480;
constexpr uint32_t kMaxCoefficients = 16;
constexpr int64_t kBlockElements = 4096;  // elements that a block updates

// A tensor. States that the rule does not have, or that are left out, are null, and so is the copy if there is none.
struct UpdateRow {
  float* param;
  const void* grad;
  float* states[kMaxStates];
  void* copy;  // may be `grad`, if both have numbers of the same size
  int64_t num_elements;
  uint32_t first_block;
  uint8_t coefficients;  // index in UpdateLaunch::coefficients
  Format grad_format, copy_format;
  bool is_aligned;  // every address: device_code::is_aligned
};

// The coefficients of the update of some of the tensors, and what their copies are ahead by.
template <class Step>
struct Coefficients {
  Step step;
  Lookahead<Step, Scalar> lookahead;
};

// The argument of a kernel.
template <class Step>
struct UpdateLaunch {
  const double* factor;  // every gradient is multiplied by it; on the device; null: 1
  float clip_value;      // after the factor: each element is cut to [-clip_value, clip_value]; may be infinite
  uint32_t num_rows, num_blocks;
  Coefficients<Step> coefficients[kMaxCoefficients];
  UpdateRow rows[kMaxTensors];
};

// ---- The kernel.

template <int kCount, class Step>
FULGUR_DEVICE_CODE void update_elements(const UpdateRow& row, const Coefficients<Step>& coefficients,
                                        const Scaling<Scalar>& scaling, int64_t first) {
  float param[kCount], grad[kCount], states[Step::kNumStates][kCount], copy[kCount];
  device_code::load<kCount>(row.param, Format::fp32, first, param);
  device_code::load<kCount>(row.grad, row.grad_format, first, grad);
  for (size_t k = 0; k < Step::kNumStates; ++k) {
    for (int i = 0; i < kCount; ++i) states[k][i] = 0.0F;
    if (row.states[k] != nullptr) device_code::load<kCount>(row.states[k], Format::fp32, first, states[k]);
  }
  for (int i = 0; i < kCount; ++i) {
    float of_element[Step::kNumStates];
    for (size_t k = 0; k < Step::kNumStates; ++k) of_element[k] = states[k][i];
    const float scaled = scaling(grad[i]), before = param[i];
    param[i] = coefficients.step(before, scaled, of_element, row.states);
    for (size_t k = 0; k < Step::kNumStates; ++k) states[k][i] = of_element[k];
    copy[i] = coefficients.lookahead(before, param[i], scaled, of_element, row.states);
  }
  device_code::store<kCount>(row.param, Format::fp32, first, param);
  for (size_t k = 0; k < Step::kNumStates; ++k) {
    if (row.states[k] != nullptr) device_code::store<kCount>(row.states[k], Format::fp32, first, states[k]);
  }
  if (row.copy != nullptr) device_code::store<kCount>(row.copy, row.copy_format, first, copy);
}

// What one thread of one block does. No two threads touch the same element, so their order does not matter.
template <class Step>
FULGUR_DEVICE_CODE void update_part(const UpdateLaunch<Step>& launch, uint32_t block, uint32_t thread) {
  using device_code::kThreads, device_code::kWidth;
  const float factor = launch.factor == nullptr ? 1.0F : static_cast<float>(*launch.factor);
  const Scaling<Scalar> scaling{Scalar(), factor, launch.clip_value, launch.clip_value < HUGE_VALF};
  const UpdateRow& row = device_code::row_of_block(launch.rows, launch.num_rows, block);
  const Coefficients<Step>& coefficients = launch.coefficients[row.coefficients];
  const int64_t begin = static_cast<int64_t>(block - row.first_block) * kBlockElements;
  const int64_t rest = row.num_elements - begin;
  const auto count = static_cast<uint32_t>(rest < kBlockElements ? rest : kBlockElements);
  const uint32_t wide = row.is_aligned ? count / kWidth * kWidth : 0;
  for (uint32_t i = thread * kWidth; i < wide; i += kThreads * kWidth) {
    update_elements<kWidth>(row, coefficients, scaling, begin + i);
  }
  for (uint32_t i = wide + thread; i < count; i += kThreads) update_elements<1>(row, coefficients, scaling, begin + i);
}

static_assert(sizeof(UpdateLaunch<AdamStep<Scalar>>) <= device_code::kMaxArgumentBytes);
static_assert(sizeof(UpdateLaunch<RMSpropStep<Scalar>>) <= device_code::kMaxArgumentBytes);

}  // namespace fulgur::optim::gpu
