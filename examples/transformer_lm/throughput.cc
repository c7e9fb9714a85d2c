#include "examples/transformer_lm/throughput.h"

namespace transformer_lm {

double Throughput::tokens_per_s() const { return fit_.rate(); }

void Throughput::on_train_start(fulgur::TrainerControl&) { fit_ = {}; }

void Throughput::on_train_epoch_start(fulgur::TrainerControl&) {
  epoch_ = {};
  start_clock();
}

void Throughput::on_train_batch_end(fulgur::TrainerControl&, const at::Tensor& loss, const fulgur::Batch& batch,
                                    int64_t) {
  const at::Tensor& tokens = batch["tokens"];
  epoch_.tokens += tokens.size(0) * (tokens.size(1) - 1);
  last_loss_ = loss;
}

void Throughput::on_validation_start(fulgur::TrainerControl&) { stop_clock(); }

void Throughput::on_validation_end(fulgur::TrainerControl& trainer) {
  if (!trainer.state().sanity_checking) start_clock();
}

void Throughput::on_train_epoch_end(fulgur::TrainerControl& trainer) {
  stop_clock();
  fit_ = {fit_.tokens + epoch_.tokens, fit_.seconds + epoch_.seconds};
  trainer.metrics().log("tokens_per_s", epoch_.rate());
}

// An accelerator runs asynchronously; reading the loss waits for it.
void Throughput::stop_clock() {
  if (last_loss_.defined()) last_loss_.item<double>();
  last_loss_.reset();
  if (started_) epoch_.seconds += std::chrono::duration<double>(Clock::now() - *started_).count();
  started_.reset();
}

}  // namespace transformer_lm
