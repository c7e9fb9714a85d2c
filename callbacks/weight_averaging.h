#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct WeightAveragingOptions {
  std::string method = "ema";  // ema: exponential moving average; swa: all updates count the same
  double decay = 0.999;        // ema: the share of the average that stays at an update; below 1
  int64_t every_n_steps = 1;   // optimizer steps between updates; 0: an update at the end of each epoch
  int64_t start_step = 0;      // updates begin after this number of optimizer steps
  int64_t start_epoch = 0;     // updates begin in this epoch (0-based)

  void describe(FieldVisitor& visit);
};

// Averages the weights of training. Validations in fit and checkpoints take the average once there is one. The end of
// fit leaves the average in the module, and so does a validation that fails. Checkpoints have the trained weights, too,
// so that a run that resumes, with this callback or without, continues as if nothing was averaged. Trainer::validate,
// test and predict with such a checkpoint use the average.
//   The average is kept in fp32, sharded over the N ranks: 4/N bytes for each parameter. It covers the parameters that
// optimizers train; buffers, such as the statistics of BatchNorm, are those of training. With delayed_update, the
// weights of a step enter the average once the update of that step is computed. SWA's learning rate is a schedule of
// configure_optimizers.
//   Throws UsageError for options out of range; fit throws UsageError for an optimizer that is not element-wise.
// Source: Polyak and Juditsky 1992 (EMA); Izmailov et al. 2018, arXiv:1803.05407 (SWA).
class WeightAveraging final : public Callback {
 public:
  using Options = WeightAveragingOptions;

  explicit WeightAveraging(Options options = {});
  static std::shared_ptr<WeightAveraging> make(Options options = {});

  std::string state_key() const override { return changed_fields(options_); }
  bool averages_weights() const override { return true; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  void on_train_end(TrainerControl& trainer) override;

  State state() const override;
  void load_state(const State& state) override;

 private:
  bool is_due_after_steps(const RunState& state);
  void update(TrainerControl& trainer);

  Options options_;
  int64_t num_updates_ = 0;
  int64_t last_step_ = 0;  // optimizer steps when an update was last looked for
  int64_t updated_epoch_ = -1;
};

}  // namespace fulgur
