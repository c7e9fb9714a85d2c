#include "fulgur/optim/fused_update.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "fulgur/base/parallel_chunks.h"
#include "fulgur/optim/fused_kernel.h"

namespace fulgur::optim {
namespace {

constexpr int64_t kUnit = 256;  // elements: chunks are cut between units, so that they stay aligned
constexpr int64_t kUnitsPerThread = (1 << 15) / kUnit;  // fewer are not worth a thread, as in torch
constexpr int64_t kStreamedBytes = 1 << 20;             // smaller outputs may still be in the cache when they are read

// The number of states that a rule must have; further states may be null.
struct RequiredStates {
  size_t operator()(const AdamRule&) const { return 2; }
  size_t operator()(const SGDRule&) const { return 0; }
  size_t operator()(const AdagradRule&) const { return 1; }
  size_t operator()(const RMSpropRule&) const { return 1; }
  size_t operator()(const LionRule&) const { return 1; }
};

template <class T>
void check(const Rule& rule, const Slice<T>& slice, const Prediction& prediction) {
  TORCH_CHECK_VALUE(slice.num_elements >= 0, "fused_update: num_elements is negative: ", slice.num_elements);
  TORCH_CHECK_VALUE(slice.param && slice.grad, "fused_update: param or grad is null");
  for (size_t i = 0; i < std::visit(RequiredStates(), rule); ++i) {
    TORCH_CHECK_VALUE(slice.states[i], "fused_update: the rule needs state ", i, ", which is null");
  }
  constexpr bool kSingle = std::is_same_v<T, float>;
  TORCH_CHECK_VALUE(slice.grad_type == c10::CppTypeToScalarType<T>::value || (kSingle && is_16_bit(slice.grad_type)),
                    "fused_update: a gradient of type ", slice.grad_type, " for parameters of type ",
                    c10::CppTypeToScalarType<T>::value);
  const bool is_of_T = slice.copy_type == c10::CppTypeToScalarType<T>::value && slice.grad_type == slice.copy_type;
  TORCH_CHECK_VALUE(!slice.copy_out || is_of_T || (kSingle && is_16_bit(slice.copy_type)),
                    "fused_update: a copy of type ", slice.copy_type, " of parameters of type ",
                    c10::CppTypeToScalarType<T>::value, " with gradients of type ", slice.grad_type);
  TORCH_CHECK_VALUE(!prediction.next || prediction.next->index() == rule.index(),
                    "fused_update: the update that is predicted is by another rule");
}

bool is_streamed(const void* out, int64_t num_bytes) {
  return out && num_bytes >= kStreamedBytes && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

void* advance(const void* start, int64_t num_bytes) {
  return start ? const_cast<char*>(static_cast<const char*>(start)) + num_bytes : nullptr;
}

template <class T>
internal::KernelCall<T> kernel_call(const Rule& rule, const Slice<T>& slice, const GradientScaling& scaling,
                                    const Prediction& prediction, int64_t begin, int64_t end) {
  const auto address_of = [](const Rule& any) {
    return std::visit([](const auto& r) -> const void* { return &r; }, any);
  };
  internal::KernelCall<T> call{
      .rule_index = rule.index(),
      .rule = address_of(rule),
      .next_rule = prediction.next ? address_of(*prediction.next) : nullptr,
      .param = slice.param + begin,
      .grad = advance(slice.grad, begin * static_cast<int64_t>(c10::elementSize(slice.grad_type))),
      .grad_type = slice.grad_type,
      .states = {},
      .copy_out = advance(slice.copy_out, begin * static_cast<int64_t>(c10::elementSize(slice.copy_type))),
      .copy_type = slice.copy_type,
      .num_elements = static_cast<size_t>(end - begin),
      .factor = static_cast<T>(scaling.factor),
      .clip_value = static_cast<T>(scaling.clip_value),
      .next_gradient = static_cast<T>(prediction.gradient),
      .repeat = static_cast<T>(prediction.repeat),
      .stream_copy =
          slice.copy_out != slice.grad &&
          is_streamed(slice.copy_out, slice.num_elements * static_cast<int64_t>(c10::elementSize(slice.copy_type))),
  };
  for (size_t i = 0; i < kMaxStates; ++i) {
    call.states[i] = slice.states[i] ? slice.states[i] + begin : nullptr;
  }
  return call;
}

template <class T>
void update_in_chunks(const Rule& rule, const Slice<T>& slice, const GradientScaling& scaling,
                      const Prediction& prediction) {
  if (slice.num_elements == 0) return;
  check(rule, slice, prediction);
  const int64_t num_units = (slice.num_elements + kUnit - 1) / kUnit;
  const auto update_units = [&](int64_t begin, int64_t end) {
    internal::run_kernel(
        kernel_call(rule, slice, scaling, prediction, begin * kUnit, std::min(end * kUnit, slice.num_elements)));
  };
  if (num_units <= kUnitsPerThread) {
    update_units(0, num_units);
  } else {
    parallel_chunks(slice.param, num_units, kUnitsPerThread, update_units);
  }
}

}  // namespace

void fused_update(const Rule& rule, const Slice<float>& slice, const GradientScaling& scaling,
                  const Prediction& prediction) {
  update_in_chunks(rule, slice, scaling, prediction);
}

void fused_update(const Rule& rule, const Slice<double>& slice, const GradientScaling& scaling,
                  const Prediction& prediction) {
  update_in_chunks(rule, slice, scaling, prediction);
}

}  // namespace fulgur::optim
