#include "fulgur/callbacks/lambda_callback.h"

#include <utility>

namespace fulgur {

LambdaCallback::LambdaCallback(Options options) : options_(std::move(options)) {}

std::shared_ptr<LambdaCallback> LambdaCallback::make(Options options) {
  return std::make_shared<LambdaCallback>(std::move(options));
}

void LambdaCallback::setup(TrainerControl& trainer, EntryPoint entry_point) {
  if (options_.setup) options_.setup(trainer, entry_point);
}

void LambdaCallback::on_fit_start(TrainerControl& trainer) {
  if (options_.on_fit_start) options_.on_fit_start(trainer);
}

void LambdaCallback::on_sanity_check_start(TrainerControl& trainer) {
  if (options_.on_sanity_check_start) options_.on_sanity_check_start(trainer);
}

void LambdaCallback::on_sanity_check_end(TrainerControl& trainer) {
  if (options_.on_sanity_check_end) options_.on_sanity_check_end(trainer);
}

void LambdaCallback::on_train_start(TrainerControl& trainer) {
  if (options_.on_train_start) options_.on_train_start(trainer);
}

void LambdaCallback::on_train_epoch_start(TrainerControl& trainer) {
  if (options_.on_train_epoch_start) options_.on_train_epoch_start(trainer);
}

BatchAction LambdaCallback::on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  return options_.on_train_batch_start ? options_.on_train_batch_start(trainer, batch, batch_idx) : BatchAction::run;
}

void LambdaCallback::on_before_zero_grad(TrainerControl& trainer) {
  if (options_.on_before_zero_grad) options_.on_before_zero_grad(trainer);
}

void LambdaCallback::on_before_backward(TrainerControl& trainer, const at::Tensor& loss) {
  if (options_.on_before_backward) options_.on_before_backward(trainer, loss);
}

void LambdaCallback::on_after_backward(TrainerControl& trainer) {
  if (options_.on_after_backward) options_.on_after_backward(trainer);
}

void LambdaCallback::on_before_optimizer_step(TrainerControl& trainer, Optimizer& optimizer) {
  if (options_.on_before_optimizer_step) options_.on_before_optimizer_step(trainer, optimizer);
}

void LambdaCallback::on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                                        int64_t batch_idx) {
  if (options_.on_train_batch_end) options_.on_train_batch_end(trainer, loss, batch, batch_idx);
}

void LambdaCallback::on_validation_start(TrainerControl& trainer) {
  if (options_.on_validation_start) options_.on_validation_start(trainer);
}

void LambdaCallback::on_validation_epoch_start(TrainerControl& trainer) {
  if (options_.on_validation_epoch_start) options_.on_validation_epoch_start(trainer);
}

void LambdaCallback::on_validation_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  if (options_.on_validation_batch_start) options_.on_validation_batch_start(trainer, batch, batch_idx);
}

void LambdaCallback::on_validation_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  if (options_.on_validation_batch_end) options_.on_validation_batch_end(trainer, batch, batch_idx);
}

void LambdaCallback::on_validation_epoch_end(TrainerControl& trainer) {
  if (options_.on_validation_epoch_end) options_.on_validation_epoch_end(trainer);
}

void LambdaCallback::on_validation_end(TrainerControl& trainer) {
  if (options_.on_validation_end) options_.on_validation_end(trainer);
}

void LambdaCallback::on_train_epoch_end(TrainerControl& trainer) {
  if (options_.on_train_epoch_end) options_.on_train_epoch_end(trainer);
}

void LambdaCallback::on_train_end(TrainerControl& trainer) {
  if (options_.on_train_end) options_.on_train_end(trainer);
}

void LambdaCallback::on_fit_end(TrainerControl& trainer) {
  if (options_.on_fit_end) options_.on_fit_end(trainer);
}

void LambdaCallback::on_test_start(TrainerControl& trainer) {
  if (options_.on_test_start) options_.on_test_start(trainer);
}

void LambdaCallback::on_test_epoch_start(TrainerControl& trainer) {
  if (options_.on_test_epoch_start) options_.on_test_epoch_start(trainer);
}

void LambdaCallback::on_test_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  if (options_.on_test_batch_start) options_.on_test_batch_start(trainer, batch, batch_idx);
}

void LambdaCallback::on_test_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  if (options_.on_test_batch_end) options_.on_test_batch_end(trainer, batch, batch_idx);
}

void LambdaCallback::on_test_epoch_end(TrainerControl& trainer) {
  if (options_.on_test_epoch_end) options_.on_test_epoch_end(trainer);
}

void LambdaCallback::on_test_end(TrainerControl& trainer) {
  if (options_.on_test_end) options_.on_test_end(trainer);
}

void LambdaCallback::on_predict_start(TrainerControl& trainer) {
  if (options_.on_predict_start) options_.on_predict_start(trainer);
}

void LambdaCallback::on_predict_epoch_start(TrainerControl& trainer) {
  if (options_.on_predict_epoch_start) options_.on_predict_epoch_start(trainer);
}

void LambdaCallback::on_predict_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) {
  if (options_.on_predict_batch_start) options_.on_predict_batch_start(trainer, batch, batch_idx);
}

void LambdaCallback::on_predict_batch_end(TrainerControl& trainer, const Batch& prediction, const Batch& batch,
                                          int64_t batch_idx) {
  if (options_.on_predict_batch_end) options_.on_predict_batch_end(trainer, prediction, batch, batch_idx);
}

void LambdaCallback::on_predict_epoch_end(TrainerControl& trainer) {
  if (options_.on_predict_epoch_end) options_.on_predict_epoch_end(trainer);
}

void LambdaCallback::on_predict_end(TrainerControl& trainer) {
  if (options_.on_predict_end) options_.on_predict_end(trainer);
}

void LambdaCallback::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  if (options_.on_metrics) options_.on_metrics(trainer, metrics, step);
}

void LambdaCallback::on_record(TrainerControl& trainer, const Record& record, int64_t step) {
  if (options_.on_record) options_.on_record(trainer, record, step);
}

void LambdaCallback::on_checkpoint_saved(TrainerControl& trainer, const std::filesystem::path& folder) {
  if (options_.on_checkpoint_saved) options_.on_checkpoint_saved(trainer, folder);
}

void LambdaCallback::on_exception(TrainerControl& trainer, const std::exception& error) {
  if (options_.on_exception) options_.on_exception(trainer, error);
}

void LambdaCallback::teardown(TrainerControl& trainer, EntryPoint entry_point) {
  if (options_.teardown) options_.teardown(trainer, entry_point);
}

}  // namespace fulgur
