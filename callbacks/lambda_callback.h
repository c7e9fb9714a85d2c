#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>

#include "fulgur/core/callback.h"

namespace fulgur {

// A function for each hook of Callback, null where nothing is to be done.
struct LambdaCallbackOptions {
  using Plain = std::function<void(TrainerControl&)>;
  using OfBatch = std::function<void(TrainerControl&, const Batch&, int64_t batch_idx)>;

  std::function<void(TrainerControl&, EntryPoint)> setup{};
  Plain on_fit_start{};
  Plain on_sanity_check_start{};
  Plain on_sanity_check_end{};
  Plain on_train_start{};
  Plain on_train_epoch_start{};
  std::function<BatchAction(TrainerControl&, const Batch&, int64_t batch_idx)> on_train_batch_start{};
  Plain on_before_zero_grad{};
  std::function<void(TrainerControl&, const at::Tensor& loss)> on_before_backward{};
  Plain on_after_backward{};
  std::function<void(TrainerControl&, Optimizer&)> on_before_optimizer_step{};
  std::function<void(TrainerControl&, const at::Tensor& loss, const Batch&, int64_t batch_idx)> on_train_batch_end{};
  Plain on_validation_start{};
  Plain on_validation_epoch_start{};
  OfBatch on_validation_batch_start{};
  OfBatch on_validation_batch_end{};
  Plain on_validation_epoch_end{};
  Plain on_validation_end{};
  Plain on_train_epoch_end{};
  Plain on_train_end{};
  Plain on_fit_end{};
  Plain on_test_start{};
  Plain on_test_epoch_start{};
  OfBatch on_test_batch_start{};
  OfBatch on_test_batch_end{};
  Plain on_test_epoch_end{};
  Plain on_test_end{};
  Plain on_predict_start{};
  Plain on_predict_epoch_start{};
  OfBatch on_predict_batch_start{};
  std::function<void(TrainerControl&, const Batch& prediction, const Batch&, int64_t batch_idx)> on_predict_batch_end{};
  Plain on_predict_epoch_end{};
  Plain on_predict_end{};
  std::function<void(TrainerControl&, const Metrics&, int64_t step)> on_metrics{};
  std::function<void(TrainerControl&, const Record&, int64_t step)> on_record{};
  std::function<void(TrainerControl&, const std::filesystem::path& folder)> on_checkpoint_saved{};
  std::function<void(TrainerControl&, const std::exception&)> on_exception{};
  std::function<void(TrainerControl&, EntryPoint)> teardown{};
};

// A callback made of functions:
//   LambdaCallback::make({.on_train_epoch_start = [](TrainerControl& trainer) { ... }})
// It runs on every rank. An on_before_optimizer_step sees the gradients of the mean loss (wants_gradients()).
class LambdaCallback final : public Callback {
 public:
  using Options = LambdaCallbackOptions;
  explicit LambdaCallback(Options options);
  static std::shared_ptr<LambdaCallback> make(Options options);

  bool wants_gradients() const override { return options_.on_before_optimizer_step != nullptr; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_fit_start(TrainerControl& trainer) override;
  void on_sanity_check_start(TrainerControl& trainer) override;
  void on_sanity_check_end(TrainerControl& trainer) override;
  void on_train_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_before_zero_grad(TrainerControl& trainer) override;
  void on_before_backward(TrainerControl& trainer, const at::Tensor& loss) override;
  void on_after_backward(TrainerControl& trainer) override;
  void on_before_optimizer_step(TrainerControl& trainer, Optimizer& optimizer) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_validation_start(TrainerControl& trainer) override;
  void on_validation_epoch_start(TrainerControl& trainer) override;
  void on_validation_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_validation_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_validation_epoch_end(TrainerControl& trainer) override;
  void on_validation_end(TrainerControl& trainer) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  void on_train_end(TrainerControl& trainer) override;
  void on_fit_end(TrainerControl& trainer) override;
  void on_test_start(TrainerControl& trainer) override;
  void on_test_epoch_start(TrainerControl& trainer) override;
  void on_test_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_test_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_test_epoch_end(TrainerControl& trainer) override;
  void on_test_end(TrainerControl& trainer) override;
  void on_predict_start(TrainerControl& trainer) override;
  void on_predict_epoch_start(TrainerControl& trainer) override;
  void on_predict_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_predict_batch_end(TrainerControl& trainer, const Batch& prediction, const Batch& batch,
                            int64_t batch_idx) override;
  void on_predict_epoch_end(TrainerControl& trainer) override;
  void on_predict_end(TrainerControl& trainer) override;
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override;
  void on_record(TrainerControl& trainer, const Record& record, int64_t step) override;
  void on_checkpoint_saved(TrainerControl& trainer, const std::filesystem::path& folder) override;
  void on_exception(TrainerControl& trainer, const std::exception& error) override;
  void teardown(TrainerControl& trainer, EntryPoint entry_point) override;

 private:
  const Options options_;
};

}  // namespace fulgur
