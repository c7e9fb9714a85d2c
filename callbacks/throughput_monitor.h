#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct ThroughputMonitorOptions {
  std::function<int64_t(const Batch&)> num_samples{};  // default: the batch's size
  std::function<int64_t(const Batch&)> num_items{};    // what samples consist of, such as tokens; null: not logged
  double flops_per_sample = 0.0;                       // floating-point operations, forward and backward; 0: not logged
  double peak_flops = 0.0;                             // what a rank can do per second, for the MFU; 0: not logged
  int64_t window_size = 100;                           // batches; the rates are means over the last ones
  void describe(FieldVisitor& visit);
};

// Logs how fast training is, from the second batch of a fit on, with the metrics of each step. Counts are those of this
// rank times the number of ranks; nothing is exchanged.
//   train/batches_per_sec, train/samples_per_sec, train/items_per_sec, train/flops_per_sec
//   train/mfu        the part of the ranks' peak_flops that the model uses (PaLM, arXiv:2204.02311, appendix B)
//   train/data_wait  the part of the time in which the step waits for its batch
// Rates are means over the last window_size batches, without the time of validations. An accelerator runs
// asynchronously, so that a rate is right as a mean over a window, but not for a single step.
// Errors: the constructor throws UsageError for numbers out of range. A num_samples that is unset needs batches whose
// size is known (Batch::batch_size).
class ThroughputMonitor final : public Callback {
 public:
  using Options = ThroughputMonitorOptions;
  explicit ThroughputMonitor(Options options = {});
  static std::shared_ptr<ThroughputMonitor> make(Options options = {});

  void on_fit_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_validation_start(TrainerControl& trainer) override;
  void on_validation_end(TrainerControl& trainer) override;

  // Means over the last fit, without its first batch; 0 before the second one.
  double samples_per_sec() const { return all_.rate(all_.samples); }
  double items_per_sec() const { return all_.rate(all_.items); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Count {
    double seconds = 0.0, waited_s = 0.0;
    double batches = 0.0, samples = 0.0, items = 0.0;  // over all ranks
    double rate(double amount) const { return seconds > 0 ? amount / seconds : 0.0; }
    void add(const Count& other, double sign = 1.0);
  };

  Count measure(TrainerControl& trainer, const Batch& batch);
  void log(TrainerControl& trainer) const;

  const Options options_;
  std::deque<Count> last_{};  // by batch, at most window_size
  Count window_{}, all_{};    // the sums over last_ and over the fit
  bool is_first_ = true;      // the first batch of a fit allocates memory
  Clock::time_point begin_{};
  double waited_before_s_ = 0.0;
  std::optional<Clock::time_point> paused_{};  // during a validation
};

}  // namespace fulgur
