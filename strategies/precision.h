#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/autocast.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/module_fwd.h"

namespace fulgur {

// The floating-point types in which a run computes, by Lightning's names:
//   32 (32-true)        as the module is; nothing is converted
//   64 (64-true)        module and batches in fp64
//   bf16-mixed (bf16)   autocast to bf16: weights, gradients and updates in fp32
//   16-mixed (16)       autocast to fp16, with a loss scale
//   bf16-true, 16-true  module and batches in bf16 or fp16; element-wise optimizers keep fp32 masters, other
//                       optimizers cause a warning; 16-true also has a loss scale
// Integer tensors are never converted. New tensors in a step have torch's default type: make them by x.options().
class Precision {
 public:
  Precision() = default;                      // 32
  explicit Precision(std::string_view name);  // throws UsageError, with the known names, for an unknown one

  std::string_view name() const { return name_; }  // the short name
  bool is_mixed() const { return autocast_dtype_.has_value(); }
  std::optional<c10::ScalarType> autocast_dtype() const { return autocast_dtype_; }
  std::optional<c10::ScalarType> true_dtype() const { return true_dtype_; }  // nullopt: nothing is converted
  bool is_true_16_bit() const { return true_dtype_ && *true_dtype_ != c10::kDouble; }
  bool needs_loss_scale() const;  // fp16: small gradients would be rounded to 0

  Batch convert(const Batch& batch) const;

  // Warns if another precision is known to be faster on this device type.
  void warn_if_slow_on(c10::DeviceType device_type) const;

 private:
  std::string_view name_ = "32";
  std::optional<c10::ScalarType> autocast_dtype_{};
  std::optional<c10::ScalarType> true_dtype_{};
};

// The scope of a forward pass in this thread: autocast, if the precision is mixed.
class ScopedPrecision {
 public:
  ScopedPrecision(const Precision& precision, c10::DeviceType device_type);

 private:
  std::optional<ScopedAutocast> autocast_;
};

// The scope of backward and updates, which may run within a ScopedPrecision (manual optimisation): autocast is off,
// and at the end cached casts of weights are dropped, because the update has made them stale.
class ScopedFullPrecision {
 public:
  ScopedFullPrecision(const Precision& precision, c10::DeviceType device_type);
  ~ScopedFullPrecision();
  ScopedFullPrecision(const ScopedFullPrecision&) = delete;
  ScopedFullPrecision& operator=(const ScopedFullPrecision&) = delete;

 private:
  std::optional<ScopedAutocast> autocast_;
};

// Converts a module's floating-point parameters and buffers to the precision's type, and later back to their own. The
// tensors stay the same objects; gradients are dropped if the type changes. Holds handles to the converted tensors.
class ConvertedModule {
 public:
  ConvertedModule(torch::nn::Module& module, const Precision& precision);
  void give_back();  // only tensors that still have the converted type

 private:
  c10::ScalarType dtype_ = c10::kFloat;
  std::vector<std::pair<at::Tensor, c10::ScalarType>> own_dtypes_;  // the converted tensors with their own types
};

}  // namespace fulgur
