#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

#include "fulgur/base/cuda_kernels.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/update_launch.h"
#include "fulgur/optim/update_rules.h"

// How the update of many tensors on a GPU is cut into launches, and these into blocks.
namespace fulgur::optim::gpu {

// An update of some of the tensors, and what their copies are ahead by.
struct RuleOfSlices {
  Rule rule;
  Prediction prediction{};
};

// A tensor in the memory of a GPU. Its copy, if any, may be of any of the formats.
struct SliceOnGpu {
  Slice<float> slice;
  size_t rule = 0;  // index of its RuleOfSlices
};

inline Format checked_format(c10::ScalarType type) {
  const Format format = format_of(type);
  TORCH_CHECK_VALUE(format != Format::none, "an update on a GPU has numbers of fp32, bf16 or fp16, not ", type);
  return format;
}

template <class Step>
Coefficients<Step> coefficients_of(const RuleOfSlices& given) {
  using Settings = typename Step::Settings;
  const Prediction& prediction = given.prediction;
  const Step step(std::get<Settings>(given.rule));
  const Ahead without_next = prediction.repeat != 0.0 ? Ahead::by_repeat : Ahead::none;
  return {step,
          {.ahead = prediction.next ? Ahead::by_next : without_next,
           .next = prediction.next ? Step(std::get<Settings>(*prediction.next)) : step,
           .next_gradient = static_cast<float>(prediction.gradient),
           .repeat = static_cast<float>(prediction.repeat)}};
}

inline UpdateRow row_of(const Slice<float>& slice) {
  UpdateRow row{.param = slice.param,
                .grad = slice.grad,
                .states = {},
                .copy = slice.copy_out,
                .num_elements = slice.num_elements,
                .first_block = 0,
                .coefficients = 0,
                .grad_format = checked_format(slice.grad_type),
                .copy_format = slice.copy_out == nullptr ? Format::none : checked_format(slice.copy_type),
                .is_aligned = false};
  std::ranges::copy(slice.states, row.states);
  const auto aligned = [](const void* numbers, Format format) { return device_code::is_aligned(numbers, format); };
  row.is_aligned = aligned(row.param, Format::fp32) && aligned(row.grad, row.grad_format) &&
                   aligned(row.copy, row.copy_format) &&
                   std::ranges::all_of(row.states, [&](const float* state) { return aligned(state, Format::fp32); });
  return row;
}

// The launches that update all slices, each once; slices without elements are left out. `factor` is as in UpdateLaunch.
// A launch ends where its table of tensors, or that of coefficients, is full.
template <class Step>
std::vector<UpdateLaunch<Step>> plan_update(const std::vector<RuleOfSlices>& rules,
                                            const std::vector<SliceOnGpu>& slices, const double* factor,
                                            double clip_value) {
  constexpr uint32_t kNotInLaunch = kMaxCoefficients;
  std::vector<UpdateLaunch<Step>> launches;
  std::vector<uint32_t> place(rules.size());  // each rule's index in the last launch's table of coefficients
  uint32_t num_coefficients = 0;
  for (const SliceOnGpu& given : slices) {
    if (given.slice.num_elements == 0) continue;
    const bool has_room = !launches.empty() && launches.back().num_rows < kMaxTensors &&
                          (place[given.rule] != kNotInLaunch || num_coefficients < kMaxCoefficients);
    if (!has_room) {
      UpdateLaunch<Step>& launch = launches.emplace_back();
      launch.factor = factor;
      launch.clip_value = static_cast<float>(clip_value);
      std::ranges::fill(place, kNotInLaunch);
      num_coefficients = 0;
    }
    UpdateLaunch<Step>& launch = launches.back();
    if (place[given.rule] == kNotInLaunch) {
      place[given.rule] = num_coefficients++;
      launch.coefficients[place[given.rule]] = coefficients_of<Step>(rules[given.rule]);
    }
    UpdateRow& row = launch.rows[launch.num_rows++] = row_of(given.slice);
    row.coefficients = static_cast<uint8_t>(place[given.rule]);
    row.first_block = launch.num_blocks;
    launch.num_blocks += static_cast<uint32_t>((row.num_elements + kBlockElements - 1) / kBlockElements);
  }
  return launches;
}

// Calls body.operator()<Step>() with the Step of a rule.
template <class Body>
void with_step_of(const Rule& rule, const Body& body) {
  if (std::holds_alternative<AdamRule>(rule)) body.template operator()<AdamStep<Scalar>>();
  if (std::holds_alternative<SGDRule>(rule)) body.template operator()<SGDStep<Scalar>>();
  if (std::holds_alternative<AdagradRule>(rule)) body.template operator()<AdagradStep<Scalar>>();
  if (std::holds_alternative<RMSpropRule>(rule)) body.template operator()<RMSpropStep<Scalar>>();
  if (std::holds_alternative<LionRule>(rule)) body.template operator()<LionStep<Scalar>>();
}

}  // namespace fulgur::optim::gpu
