#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct EarlyStoppingOptions {
  std::string monitor{};                         // name of a logged metric, such as val_loss
  std::string mode = "min";                      // min or max: which value of the monitor is better
  int64_t patience = 3;                          // fit stops after this number of checks in a row without improvement
  double min_delta = 0.0;                        // an improvement is larger than this, in the monitor's unit
  bool check_finite = true;                      // stop when the monitor is NaN or infinite
  std::optional<double> stopping_threshold{};    // stop once the monitor is better than this
  std::optional<double> divergence_threshold{};  // stop once the monitor is worse than this
  void describe(FieldVisitor& visit);
};

// Stops fit when a metric stops improving. The metric is checked whenever it has a new value: at the end of every
// validation that logs it; or, if validations do not, at the end of every training epoch. patience counts these checks,
// and the message of the stop says how many there were, and whether they were validations or epochs. As Lightning's
// EarlyStopping, without check_on_train_epoch_end. All ranks decide by rank 0's value.
//   A run that resumes continues to count; if it was about to stop, it stops, unless its options are others by now. A
//   stop that waits for min_epochs or min_steps is kept, too, even if the metric has improved since (FitBounds).
// Errors: the constructor throws UsageError for options that cannot be used. Throws SetupError at the end of the first
// training epoch after which the monitor should be known but is not, with the names of the metrics there are.
class EarlyStopping final : public Callback {
 public:
  using Options = EarlyStoppingOptions;
  explicit EarlyStopping(Options options);
  static std::shared_ptr<EarlyStopping> make(Options options);

  bool runs_last() const override { return true; }
  bool runs_in_fast_dev_run() const override { return false; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_fit_start(TrainerControl& trainer) override;
  void on_train_start(TrainerControl& trainer) override;
  void on_validation_end(TrainerControl& trainer) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  std::string state_key() const override { return changed_fields(options_); }
  State state() const override;
  void load_state(const State& state) override;

  double best_score() const { return counts_.best; }   // NaN before the first check
  int64_t wait_count() const { return counts_.wait; }  // checks since the last improvement

  // Why fit is to stop, for example "'val_loss' has not improved on 0.12 in 3 validations"; nullopt: it goes on.
  std::optional<std::string> reason_to_stop() const;

 private:
  struct Counts {
    int64_t checks = 0;
    int64_t wait = 0;
    double best = std::numeric_limits<double>::quiet_NaN();
    double last = std::numeric_limits<double>::quiet_NaN();
    bool is_validated = false;  // validations log the monitor
    bool has_validated = false;
  };

  bool better(double a, double b) const { return options_.mode == "min" ? a < b : a > b; }
  bool improves(double value) const;
  static bool is_known(TrainerControl& trainer, bool here);
  void check(TrainerControl& trainer);

  Options options_;
  Counts counts_{};
};

}  // namespace fulgur
