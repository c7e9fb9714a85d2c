#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/autocast.h"
#include "core/batch.h"

namespace fulgur {

// In which floating-point types a run computes, by Lightning's names:
//   32 (32-true)        as the module is; nothing is converted
//   64 (64-true)        module and batches in fp64
//   bf16-mixed (bf16)   autocast to bf16: weights, gradients and updates in fp32
//   16-mixed (16)       autocast to fp16, with a loss scale
//   bf16-true, 16-true  module and batches in bf16 or fp16; element-wise optimizers keep fp32 masters (for others there
//                       is a warning), 16-true a loss scale too
// Integer tensors are never converted, and neither is the type of new tensors in a step: make them by x.options().
class Precision {
 public:
  Precision() = default;                      // 32
  explicit Precision(std::string_view name);  // throws UsageError, with the known names, for another one

  std::string_view name() const { return name_; }  // the short one
  bool is_mixed() const { return autocast_dtype_.has_value(); }
  std::optional<c10::ScalarType> autocast_dtype() const { return autocast_dtype_; }
  std::optional<c10::ScalarType> true_dtype() const { return true_dtype_; }  // what is converted becomes that
  bool is_true_16_bit() const { return true_dtype_ && *true_dtype_ != c10::kDouble; }
  bool needs_loss_scale() const;  // fp16: small gradients would be rounded to 0

  Batch convert(const Batch& batch) const;

  // Warns if another precision is known to be faster there.
  void warn_if_slow_on(c10::DeviceType device_type) const;

 private:
  std::string_view name_ = "32";
  std::optional<c10::ScalarType> autocast_dtype_{};
  std::optional<c10::ScalarType> true_dtype_{};
};

// What a forward pass runs in, in this thread: autocast, if the precision is mixed.
class PrecisionScope {
 public:
  PrecisionScope(const Precision& precision, c10::DeviceType device_type);

 private:
  std::optional<AutocastScope> autocast_;
};

// What backward and updates run in, should they be called within a PrecisionScope (manual optimisation does): autocast
// is off, and at the end no cast weights are left that the update has made stale.
class OutsidePrecisionScope {
 public:
  OutsidePrecisionScope(const Precision& precision, c10::DeviceType device_type);
  ~OutsidePrecisionScope();
  OutsidePrecisionScope(const OutsidePrecisionScope&) = delete;
  OutsidePrecisionScope& operator=(const OutsidePrecisionScope&) = delete;

 private:
  std::optional<AutocastScope> autocast_;
};

// A module's floating parameters and buffers in the precision's type, and later in their own again. The tensors stay
// the same objects; gradients are dropped where the type changes. Holds handles to what it has converted.
class ConvertedModule {
 public:
  ConvertedModule(torch::nn::Module& module, const Precision& precision);
  void give_back();  // what still has the type that it was given

 private:
  c10::ScalarType dtype_ = c10::kFloat;
  std::vector<std::pair<at::Tensor, c10::ScalarType>> own_dtypes_;  // of what was converted
};

}  // namespace fulgur
