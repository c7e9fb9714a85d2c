#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "core/batch.h"
#include "core/metric_log.h"
#include "core/optimizer.h"
#include "core/run_state.h"

namespace fulgur {

// Which of the hooks that decide how a run goes a Module type overrides. overridden_hooks<T>()
// (core/overridden_hooks.h) finds out at compile time.
struct OverriddenHooks {
  bool training_step = false;
  bool configure_optimizers = false;
  bool validation_step = false;
  bool test_step = false;
  bool predict_step = false;
};

// The user's model: a torch::nn::Module that also says what a step does and how it is optimised. The Trainer does the
// rest, whatever the strategy.
//   struct Net : Module {
//     at::Tensor training_step(const Batch& batch, int64_t batch_idx) override { ... return loss; }
//     Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-3}); }
//   };
// Hooks stand in the order in which they fire (Lightning's); see core/callback.h for who comes first.
// Ownership: held by shared_ptr (make_module), as torch asks of its modules.
// Threading: strategies call the steps, one thread per replica; all other hooks come on the training thread.
class Module : public torch::nn::Module {
 public:
  virtual void prepare_data() {}  // download, unpack: once per machine
  virtual void setup(EntryPoint) {}
  virtual Optimizers configure_optimizers();

  virtual void on_fit_start() {}
  virtual void on_train_start() {}
  virtual void on_train_epoch_start() {}
  virtual void on_train_batch_start(const Batch&, int64_t /*batch_idx*/) {}

  // Returns the loss, a tensor of one element that backward can start from. An undefined tensor skips the batch: no
  // backward, no optimizer step.
  virtual at::Tensor training_step(const Batch& batch, int64_t batch_idx);

  virtual void on_before_zero_grad() {}
  virtual void on_before_backward(const at::Tensor& /*loss*/) {}
  virtual void on_after_backward() {}
  virtual void on_before_optimizer_step() {}
  virtual void on_train_batch_end(const at::Tensor& /*loss, detached*/, const Batch&, int64_t /*batch_idx*/) {}

  // Evaluation, without gradients and in eval mode; results go to log().
  virtual void on_validation_start() {}
  virtual void on_validation_epoch_start() {}
  virtual void on_validation_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  virtual void validation_step(const Batch& batch, int64_t batch_idx);
  virtual void on_validation_batch_end(const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_validation_epoch_end() {}
  virtual void on_validation_end() {}

  virtual void on_train_epoch_end() {}
  virtual void on_train_end() {}
  virtual void on_fit_end() {}

  virtual void on_test_start() {}
  virtual void on_test_epoch_start() {}
  virtual void on_test_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  virtual void test_step(const Batch& batch, int64_t batch_idx);
  virtual void on_test_batch_end(const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_test_epoch_end() {}
  virtual void on_test_end() {}

  virtual void on_predict_start() {}
  virtual void on_predict_epoch_start() {}
  virtual void on_predict_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  virtual Batch predict_step(const Batch& batch, int64_t batch_idx);
  virtual void on_predict_batch_end(const Batch& /*prediction*/, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_predict_epoch_end() {}
  virtual void on_predict_end() {}

  virtual void teardown(EntryPoint) {}

  // Logs a number or a tensor of one element: `log("val_acc", accuracy, {.prog_bar = true})`. Defaults depend on the
  // hook: core/metric_log.h. Outside a run it warns, once, and does nothing. (It hides ::log: write std::log.)
  void log(std::string_view name, const at::Tensor& value, const LogOptions& options = {});
  void log(std::string_view name, double value, const LogOptions& options = {});

  const RunState& run_state() const;  // throws c10::Error outside a run
  int64_t current_epoch() const { return run_state().epoch; }
  int64_t global_step() const { return run_state().global_step; }

  // For the Trainer: where log() and run_state() lead while a run lasts. Both outlive it or are detached by nullptr.
  void attach(const RunState* state, MetricLog* metrics);

 private:
  template <class T, class... Args>
  friend std::shared_ptr<T> make_module(Args&&... args);
  friend class ModuleHandle;

  MetricLog* attached_log(std::string_view name);

  std::optional<OverriddenHooks> overridden_hooks_{};        // known to make_module
  std::function<std::shared_ptr<Module>()> make_another_{};  // the same type from the same arguments; for replicas
  const RunState* state_ = nullptr;
  MetricLog* metrics_ = nullptr;
};

}  // namespace fulgur
