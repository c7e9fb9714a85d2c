#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct LearningRateMonitorOptions {
  std::string logging_interval = "step";  // step or epoch
  bool log_weight_decay = false;
  void describe(FieldVisitor& visit);
};

// Logs the learning rate of every parameter group, as the step or the epoch uses it, by the names that Lightning gives:
//   lr-AdamW               by the optimizer, or the name of its schedule (LRSchedulerConfig::name), if it has one
//   lr-AdamW-1             the second optimizer of that name
//   lr-AdamW/backbone      one of several groups, by its name, or by its number: lr-AdamW/pg1, lr-AdamW/pg2, ...
//   lr-AdamW-weight_decay  the weight decay
// Throws UsageError for an unknown interval.
class LearningRateMonitor final : public Callback {
 public:
  using Options = LearningRateMonitorOptions;
  explicit LearningRateMonitor(Options options = {});
  static std::shared_ptr<LearningRateMonitor> make(Options options = {});

  void on_fit_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;

 private:
  void log(TrainerControl& trainer);

  Options options_;
  std::vector<std::vector<std::string>> names_;  // by optimizer and group
};

}  // namespace fulgur
