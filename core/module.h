#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/field_state.h"
#include "fulgur/base/state.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/core/manual_optimization.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/core/run_state.h"

namespace fulgur {

// Tells, for each hook that changes the course of a run, whether a Module type overrides it. overridden_hooks<T>()
// (core/overridden_hooks.h) finds out at compile time.
struct OverriddenHooks {
  bool training_step = false;
  bool configure_optimizers = false;
  bool validation_step = false;
  bool test_step = false;
  bool predict_step = false;
  bool backward = false;
  bool on_after_backward = false;
  bool on_before_optimizer_step = false;
  bool configure_gradient_clipping = false;
  bool transfer_batch_to_device = false;
};

// What a Module can access of the run that it is in. The pointers are valid until its teardown ends.
struct RunAccess {
  const RunState* state = nullptr;
  MetricLog* metrics = nullptr;  // null in barebones mode: log() does nothing
  ManualOptimization* manual_optimization = nullptr;
  GradientClipping clipping{};  // as set in TrainerOptions
  TrainerControl* trainer = nullptr;
  bool sends_records = true;       // false for replicas, but the first
  c10::Device device = c10::kCPU;  // where the module's steps run
};

// The user's model: a torch::nn::Module that also says what a step does and how it is optimised. The Trainer does the
// rest, with any strategy.
//   struct Net : Module {
//     at::Tensor training_step(const Batch& batch, int64_t batch_idx) override { return loss(batch); }
//     Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-3}); }
//   };
// Hooks are declared in the order in which they fire (Lightning's); core/callback.h has the order of callbacks and
// Module.
// Ownership: held by shared_ptr (make_module), as torch requires of its modules.
// Threading: strategies call the steps, one thread per replica; all other hooks run on the training thread.
class Module : public torch::nn::Module {
 public:
  virtual void prepare_data() {}     // download, unpack: once per machine
  virtual void setup(EntryPoint) {}  // runs on every rank, after prepare_data() and before configure_model()
  virtual void configure_model() {}  // builds what is too big for the constructor; every entry point calls it
  virtual Optimizers configure_optimizers();

  // Callbacks of this run; each replaces the Trainer's callbacks of the same type.
  virtual std::vector<std::shared_ptr<Callback>> configure_callbacks() { return {}; }

  virtual void on_fit_start() {}
  virtual void on_train_start() {}
  virtual void on_train_epoch_start() {}

  // Called for every batch of every stage, before and after it moves to the device.
  virtual Batch on_before_batch_transfer(Batch batch) { return batch; }
  // The default copies to a GPU from pinned memory, without waiting for the copy.
  virtual Batch transfer_batch_to_device(const Batch& batch, c10::Device device) {
    return device.is_cpu() ? batch.to(device) : batch.pin().to(device, /*non_blocking=*/true);
  }
  virtual Batch on_after_batch_transfer(Batch batch) { return batch; }

  virtual BatchAction on_train_batch_start(const Batch&, int64_t /*batch_idx*/) { return BatchAction::run; }

  // Returns the loss, a tensor of one element that backward can start from. An undefined tensor skips the batch: no
  // backward, no optimizer step. In manual optimisation the result is only passed to on_train_batch_end.
  virtual at::Tensor training_step(const Batch& batch, int64_t batch_idx);

  virtual void on_before_zero_grad() {}
  virtual void on_before_backward(const at::Tensor& /*loss*/) {}
  virtual void backward(const at::Tensor& loss);  // loss.backward()
  virtual void on_after_backward() {}             // gradients of this rank only

  // The gradients are those of the mean loss over the micro-batches, not yet clipped.
  virtual void on_before_optimizer_step(Optimizer&) {}

  // Override to clip in another way, by clip_gradients() or by hand.
  virtual void configure_gradient_clipping(Optimizer& optimizer, const GradientClipping& clipping);

  // Override to do something around the update, or to skip the update by not calling `step`: then no step is counted,
  // and no schedule advances. With several ranks, all must skip it or none: their weights would differ from then on.
  virtual void optimizer_step(Optimizer&, const std::function<void()>& step) { step(); }

  // Advances a schedule that the Trainer steps. `metric` is the value of the schedule's monitor.
  virtual void lr_scheduler_step(LRSchedule& schedule, std::optional<double> metric) { schedule.step(metric); }

  virtual void on_train_batch_end(const at::Tensor& /*loss, detached; undefined if skipped*/, const Batch&,
                                  int64_t /*batch_idx*/) {}

  // Evaluation, without gradients and in eval mode; results go to log().
  virtual void on_validation_model_zero_grad();  // before validation inside fit; drops the gradients
  virtual void on_validation_model_eval() { eval(); }
  virtual void on_validation_start() {}
  virtual void on_validation_epoch_start() {}
  virtual void on_validation_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  virtual void validation_step(const Batch& batch, int64_t batch_idx);
  virtual void on_validation_batch_end(const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_validation_epoch_end() {}
  virtual void on_validation_end() {}
  virtual void on_validation_model_train() {}  // the modes of all submodules are restored by now

  virtual void on_train_epoch_end() {}
  virtual void on_train_end() {}
  virtual void on_fit_end() {}

  virtual void on_test_model_eval() { eval(); }
  virtual void on_test_start() {}
  virtual void on_test_epoch_start() {}
  virtual void on_test_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  virtual void test_step(const Batch& batch, int64_t batch_idx);
  virtual void on_test_batch_end(const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_test_epoch_end() {}
  virtual void on_test_end() {}
  virtual void on_test_model_train() {}

  virtual void on_predict_model_eval() { eval(); }
  virtual void on_predict_start() {}
  virtual void on_predict_epoch_start() {}
  virtual void on_predict_batch_start(const Batch&, int64_t /*batch_idx*/) {}
  // Returns the predictions, tensors by name, whose dim 0 counts samples. Trainer::predict copies them to the CPU and
  // returns them.
  virtual Batch predict_step(const Batch& batch, int64_t batch_idx);
  virtual void on_predict_batch_end(const Batch& /*prediction*/, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_predict_epoch_end() {}
  virtual void on_predict_end() {}
  virtual void on_predict_model_train() {}

  virtual void teardown(EntryPoint) {}

  // What a checkpoint keeps of the module in addition to parameters and buffers: `state.set("vocabulary", text)`. Every
  // entry point that is given a checkpoint loads it, once the weights are there, before on_fit_start and the like.
  virtual void on_save_checkpoint(State&) {}
  virtual void on_load_checkpoint(const State&) {}

  // Keeps the fields of an options struct in every checkpoint, from where load_hyper_parameters and Lightning's
  // load_from_checkpoint read them. Called in the constructor; the last of several calls counts.
  template <class Options>
  void save_hyper_parameters(const Options& options) {
    hyper_parameters_ = fields_to_state(options);
  }
  const State& hyper_parameters() const { return hyper_parameters_; }

  // Logs a number, a tensor of one element, or a stateful metric: `log("val_acc", accuracy, {.prog_bar = true})`.
  // Defaults depend on the hook: core/metric_log.h. Outside a run, log() warns once and does nothing. (It hides ::log:
  // write std::log.)
  void log(std::string_view name, const at::Tensor& value, const LogOptions& options = {});
  void log(std::string_view name, double value, const LogOptions& options = {});
  void log(std::string_view name, Metric& metric, const LogOptions& options = {});

  // Send a histogram of a tensor's elements, a text or an image ([height, width] or [channels, height, width]; uint8,
  // or from 0 to 1) to the loggers that can show it. When: TrainerControl::log_histogram. With replicas only the first
  // one's are sent. Outside a run they warn once and do nothing.
  void log_histogram(std::string_view name, const at::Tensor& values);
  void log_text(std::string_view name, std::string text);
  void log_image(std::string_view name, const at::Tensor& pixels);

  const RunState& run_state() const;  // throws c10::Error outside a run
  int64_t current_epoch() const { return run_state().epoch; }
  int64_t global_step() const { return run_state().global_step; }
  int64_t dataloader_idx() const { return run_state().dataloader_idx; }

  // How many optimizer steps this fit will take, for a learning rate schedule (RunState says how they are counted).
  // Throws UsageError if nothing bounds them.
  int64_t estimated_stepping_batches() const;

  // The rank of this process, the number of ranks, and the device that steps run on; outside a run rank 0 of 1, on the
  // CPU.
  int64_t global_rank() const;
  int64_t world_size() const;
  bool is_global_zero() const { return global_rank() == 0; }
  c10::Device device() const { return link_.device; }

  // Calls `body` while the parameters are those that validations and checkpoints take, for a hook of a training batch
  // that reads or exports weights: TrainerControl::with_evaluated_weights says what it sees otherwise. Outside a run
  // the parameters are that already.
  void with_evaluated_weights(const std::function<void()>& body);

  // As in TrainerControl (core/callback.h). Both throw c10::Error outside a run.
  void request_stop(std::string_view reason);
  at::Tensor all_gather(const at::Tensor& tensor);

  // The optimizers of fit, in automatic optimisation, too: to read learning rates, or to add a group of parameters in
  // on_train_epoch_start: `optimizers()[0].add_param_group({.params = backbone->parameters()})`. Throws c10::Error
  // outside fit.
  const Optimizers& optimizers() const;

  // Manual optimisation: set automatic_optimization to false in the constructor, and training_step does everything.
  //   at::Tensor training_step(const Batch& batch, int64_t) override {
  //     const auto guard = toggle_optimizer(0);
  //     auto opt = optimizer(0);
  //     opt.zero_grad();
  //     manual_backward(loss(batch));
  //     opt.step();
  //     return {};
  //   }
  // All throw c10::Error outside fit; manual_backward and optimizer also in automatic optimisation.
  bool automatic_optimization = true;
  ManualOptimizer optimizer(size_t index = 0);
  void manual_backward(const at::Tensor& loss);
  ScopedToggle toggle_optimizer(size_t index);
  LRSchedule& lr_scheduler(size_t index = 0);  // call step() at any time

  // For configure_gradient_clipping. Throws c10::ValueError if the Trainer clips by other values.
  void clip_gradients(Optimizer& optimizer, const GradientClipping& clipping);

  // The name of the type, for messages: torch's, without anonymous namespaces.
  std::string name() const;

  // For the Trainer: connects log() and the functions above to a run.
  void attach(const RunAccess& link) { link_ = link; }

  // For strategies with replicas.
  const RunAccess& link() const { return link_; }
  std::shared_ptr<Module> make_another() const;  // see make_module; throws UsageError if it cannot

 private:
  template <class T, class... Args>
  friend std::shared_ptr<T> make_module(Args&&... args);
  friend class ModuleHandle;

  MetricLog* attached_log(std::string_view name);
  TrainerControl* attached_loggers(std::string_view name);
  ManualOptimization& manual_optimization(std::string_view caller) const;
  TrainerControl& trainer(std::string_view caller) const;

  std::optional<OverriddenHooks> overridden_hooks_{};        // nullopt: not made by make_module
  std::function<std::shared_ptr<Module>()> make_another_{};  // same type, same arguments; for replicas
  RunAccess link_;
  State hyper_parameters_;
  bool has_warned_of_log_ = false;  // log() outside a run does nothing
};

}  // namespace fulgur
