#include "core/module.h"

#include <c10/util/Exception.h>

#include "core/logging.h"

namespace fulgur {
namespace {

[[noreturn]] void not_overridden(const torch::nn::Module& module, const char* signature) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, module.name(), " does not override ", signature,
                              "; does a member of the same name with another signature hide it?");
}

}  // namespace

Optimizers Module::configure_optimizers() { return {}; }

at::Tensor Module::training_step(const Batch&, int64_t) {
  not_overridden(*this, "at::Tensor training_step(const Batch&, int64_t)");
}

void Module::validation_step(const Batch&, int64_t) {
  not_overridden(*this, "void validation_step(const Batch&, int64_t)");
}

void Module::test_step(const Batch&, int64_t) { not_overridden(*this, "void test_step(const Batch&, int64_t)"); }

Batch Module::predict_step(const Batch&, int64_t) {
  not_overridden(*this, "Batch predict_step(const Batch&, int64_t)");
}

void Module::log(std::string_view name, const at::Tensor& value, const LogOptions& options) {
  if (MetricLog* metrics = attached_log(name)) metrics->log(name, value, options);
}

void Module::log(std::string_view name, double value, const LogOptions& options) {
  if (MetricLog* metrics = attached_log(name)) metrics->log(name, value, options);
}

MetricLog* Module::attached_log(std::string_view name) {
  static bool warned = false;
  if (metrics_ == nullptr && !warned) {
    warned = true;
    log_warning("log('{}') was called on a module that no Trainer is running; the value is dropped", name);
  }
  return metrics_;
}

const RunState& Module::run_state() const {
  TORCH_CHECK(state_ != nullptr, name(), ": current_epoch() and global_step() are known only while a Trainer runs");
  return *state_;
}

void Module::attach(const RunState* state, MetricLog* metrics) {
  state_ = state;
  metrics_ = metrics;
}

}  // namespace fulgur
