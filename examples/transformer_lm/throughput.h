#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "fulgur.h"

namespace transformer_lm {

// Measures training in tokens per second, validation left out, and logs it as tokens_per_s at the end of every epoch.
class Throughput final : public fulgur::Callback {
 public:
  double tokens_per_s() const;  // mean over the last fit so far; 0 before it

  void on_train_start(fulgur::TrainerControl& trainer) override;
  void on_train_epoch_start(fulgur::TrainerControl& trainer) override;
  void on_train_batch_end(fulgur::TrainerControl& trainer, const at::Tensor& loss, const fulgur::Batch& batch,
                          int64_t batch_idx) override;
  void on_validation_start(fulgur::TrainerControl& trainer) override;
  void on_validation_end(fulgur::TrainerControl& trainer) override;
  void on_train_epoch_end(fulgur::TrainerControl& trainer) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Count {
    int64_t tokens = 0;
    double seconds = 0.0;
    double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0; }
  };

  void start_clock() { started_ = Clock::now(); }
  void stop_clock();

  Count epoch_, fit_;
  std::optional<Clock::time_point> started_{};  // unset while the clock is stopped
  at::Tensor last_loss_{};
};

}  // namespace transformer_lm
