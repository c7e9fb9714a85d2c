#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/callback.h"
#include "tests/testing/tiny.h"

namespace fulgur::testing {

// Each class reports its hooks, by name, when they are reached, and otherwise does what its base does.
using Reached = std::function<void(const std::string& hook)>;

#define M_HOOK(hook) \
  void hook() override { reached(#hook); }
#define M_BATCH(hook) \
  void hook(const Batch&, int64_t) override { reached(#hook); }
#define M_THEN(result, hook, parameters, ...) \
  result hook parameters override {           \
    reached(#hook);                           \
    return TinyModule::hook(__VA_ARGS__);     \
  }

struct ReportingModule : TinyModule {
  explicit ReportingModule(Reached given) : reached(std::move(given)) {}
  Reached reached;

  M_HOOK(prepare_data)
  void setup(EntryPoint) override { reached("setup"); }
  M_HOOK(configure_model)
  M_THEN(std::vector<std::shared_ptr<Callback>>, configure_callbacks, ())
  M_THEN(Optimizers, configure_optimizers, ())
  M_HOOK(on_fit_start)
  M_HOOK(on_train_start)
  M_HOOK(on_train_epoch_start)
  M_THEN(Batch, on_before_batch_transfer, (Batch batch), batch)
  M_THEN(Batch, transfer_batch_to_device, (const Batch& batch, c10::Device device), batch, device)
  M_THEN(Batch, on_after_batch_transfer, (Batch batch), batch)
  M_THEN(BatchAction, on_train_batch_start, (const Batch& batch, int64_t i), batch, i)
  M_THEN(at::Tensor, training_step, (const Batch& batch, int64_t i), batch, i)
  M_HOOK(on_before_zero_grad)
  void on_before_backward(const at::Tensor&) override { reached("on_before_backward"); }
  M_THEN(void, backward, (const at::Tensor& loss), loss)
  M_HOOK(on_after_backward)
  void on_before_optimizer_step(Optimizer&) override { reached("on_before_optimizer_step"); }
  M_THEN(void, configure_gradient_clipping, (Optimizer & optimizer, const GradientClipping& clipping), optimizer,
         clipping)
  M_THEN(void, optimizer_step, (Optimizer & optimizer, const std::function<void()>& step), optimizer, step)
  M_THEN(void, lr_scheduler_step, (LRSchedule & schedule, std::optional<double> metric), schedule, metric)
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override { reached("on_train_batch_end"); }
  M_THEN(void, on_validation_model_zero_grad, ())
  M_THEN(void, on_validation_model_eval, ())
  M_HOOK(on_validation_start)
  M_HOOK(on_validation_epoch_start)
  M_BATCH(on_validation_batch_start)
  M_THEN(void, validation_step, (const Batch& batch, int64_t i), batch, i)
  M_BATCH(on_validation_batch_end)
  M_HOOK(on_validation_epoch_end)
  M_HOOK(on_validation_end)
  M_HOOK(on_validation_model_train)
  M_HOOK(on_train_epoch_end)
  M_HOOK(on_train_end)
  M_HOOK(on_fit_end)
  M_THEN(void, on_test_model_eval, ())
  M_HOOK(on_test_start)
  M_HOOK(on_test_epoch_start)
  M_BATCH(on_test_batch_start)
  M_THEN(void, test_step, (const Batch& batch, int64_t i), batch, i)
  M_BATCH(on_test_batch_end)
  M_HOOK(on_test_epoch_end)
  M_HOOK(on_test_end)
  M_HOOK(on_test_model_train)
  M_THEN(void, on_predict_model_eval, ())
  M_HOOK(on_predict_start)
  M_HOOK(on_predict_epoch_start)
  M_BATCH(on_predict_batch_start)
  M_THEN(Batch, predict_step, (const Batch& batch, int64_t i), batch, i)
  void on_predict_batch_end(const Batch&, const Batch&, int64_t) override { reached("on_predict_batch_end"); }
  M_HOOK(on_predict_epoch_end)
  M_HOOK(on_predict_end)
  M_HOOK(on_predict_model_train)
  void teardown(EntryPoint) override { reached("teardown"); }
};

#undef M_HOOK
#undef M_BATCH
#undef M_THEN

#define C_HOOK(hook, ...) \
  void hook(TrainerControl&, ##__VA_ARGS__) override { reached_(#hook); }

class ReportingCallback : public Callback {
 public:
  explicit ReportingCallback(Reached reached) : reached_(std::move(reached)) {}
  C_HOOK(setup, EntryPoint)
  C_HOOK(on_fit_start)
  C_HOOK(on_sanity_check_start)
  C_HOOK(on_sanity_check_end)
  C_HOOK(on_train_start)
  C_HOOK(on_train_epoch_start)
  BatchAction on_train_batch_start(TrainerControl&, const Batch&, int64_t) override {
    reached_("on_train_batch_start");
    return BatchAction::run;
  }
  C_HOOK(on_before_zero_grad)
  C_HOOK(on_before_backward, const at::Tensor&)
  C_HOOK(on_after_backward)
  C_HOOK(on_before_optimizer_step, Optimizer&)
  C_HOOK(on_train_batch_end, const at::Tensor&, const Batch&, int64_t)
  C_HOOK(on_validation_start)
  C_HOOK(on_validation_epoch_start)
  C_HOOK(on_validation_batch_start, const Batch&, int64_t)
  C_HOOK(on_validation_batch_end, const Batch&, int64_t)
  C_HOOK(on_validation_epoch_end)
  C_HOOK(on_validation_end)
  C_HOOK(on_train_epoch_end)
  C_HOOK(on_train_end)
  C_HOOK(on_fit_end)
  C_HOOK(on_test_start)
  C_HOOK(on_test_epoch_start)
  C_HOOK(on_test_batch_start, const Batch&, int64_t)
  C_HOOK(on_test_batch_end, const Batch&, int64_t)
  C_HOOK(on_test_epoch_end)
  C_HOOK(on_test_end)
  C_HOOK(on_predict_start)
  C_HOOK(on_predict_epoch_start)
  C_HOOK(on_predict_batch_start, const Batch&, int64_t)
  C_HOOK(on_predict_batch_end, const Batch&, const Batch&, int64_t)
  C_HOOK(on_predict_epoch_end)
  C_HOOK(on_predict_end)
  C_HOOK(on_metrics, const Metrics&, int64_t)
  C_HOOK(on_exception, const std::exception&)
  C_HOOK(teardown, EntryPoint)

 private:
  Reached reached_;
};

#undef C_HOOK

}  // namespace fulgur::testing
