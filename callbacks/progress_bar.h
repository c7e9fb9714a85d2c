#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "fulgur/base/describe.h"
#include "fulgur/base/logging.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct ProgressBarOptions {
  std::chrono::milliseconds refresh_interval{100};  // minimum time between two redraws on a terminal
  std::ostream* out = nullptr;                      // null: stdout
  std::optional<bool> is_terminal{};                // unset: whether stdout is a terminal
  size_t columns = 0;                               // width of the terminal; 0: that of stdout, or 80 if it has none
  void describe(FieldVisitor& visit);
};

// Shows the progress of a run in one line:
//   Epoch 3/10  42% 394/938 | 1.9k it/s | ETA 0:21 | train_loss 0.113 | val_acc 0.981
// On a terminal the line is redrawn in place, also for validation, test and prediction ("Validation  40% 4/10 | ..."),
// and is cleared for log lines; otherwise there is one line at the end of each training epoch. While the line is
// redrawn it is cut to the width of the terminal; at the end of an epoch it is printed whole. Between two redraws a
// step costs one look at the clock; metrics logged with prog_bar are read only when the line is drawn.
class ProgressBar final : public Callback {
 public:
  using Options = ProgressBarOptions;
  explicit ProgressBar(Options options = {});
  static std::shared_ptr<ProgressBar> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }

  void on_train_epoch_start(TrainerControl& trainer) override;
  void on_validation_start(TrainerControl& trainer) override;
  void on_validation_end(TrainerControl& trainer) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  void on_validation_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_validation_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_test_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_test_batch_end(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_test_end(TrainerControl& trainer) override;
  void on_predict_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_predict_batch_end(TrainerControl& trainer, const Batch& prediction, const Batch& batch,
                            int64_t batch_idx) override;
  void on_predict_end(TrainerControl& trainer) override;
  void on_exception(TrainerControl& trainer, const std::exception& error) override;

 private:
  using Clock = std::chrono::steady_clock;

  bool is_time_to_draw();
  void begin_pass(int64_t batch_idx);
  void draw_pass(TrainerControl& trainer, int64_t batches);
  void end_pass(const TrainerControl& trainer);
  size_t columns() const;
  void draw(const std::string& line);
  void clear_line();
  void end_line();

  Options options_;
  bool is_terminal_;
  Clock::time_point epoch_start_{};       // advanced by the time that validation took
  std::optional<int64_t> first_batch_{};  // index of the first batch that this process ran in the epoch
  Clock::time_point validation_start_{};
  Clock::time_point pass_start_{};  // start of the running evaluation loader
  Clock::time_point last_drawn_{};
  std::mutex mutex_{};                               // guards the stream and the members below: other threads may log
  std::string line_{};                               // the line that was drawn last, whole; empty: no line
  size_t width_ = 0;                                 // columns of the line on the terminal, where it may be cut
  std::optional<ScopedBeforeLogLine> makes_room_{};  // set on a terminal
};

}  // namespace fulgur
