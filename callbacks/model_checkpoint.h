#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/metric_log.h"

namespace fulgur {

struct ModelCheckpointOptions {
  std::filesystem::path dirpath{};  // empty: checkpoints/ in the run's folder
  // {epoch}, {step} or a metric, with an optional format, as in {val_acc:.3f}. The default becomes epoch=3-step=120.
  std::string filename = "{epoch}-{step}";
  std::string monitor{};       // the metric that ranks checkpoints; empty: none is ranked, and there is no link best
  std::string mode = "min";    // min or max: which value of the monitor is better
  int64_t save_top_k = 1;      // how many of the best to keep; -1: all, 0: save none
  int64_t every_n_epochs = 1;  // saves in every n-th epoch: at its validations, and where it ends
  int64_t every_n_train_steps = 0;  // optimizer steps from one save to the next, instead of by epochs; 0: off
  bool save_weights_only = false;   // no run can resume from such checkpoints
  bool async = false;               // write in the background
  void describe(FieldVisitor& visit);
};

// Saves checkpoints at the end of training epochs (of those that validated, if fit validates) and at the validations
// in the middle of them, or every n steps; and at the last step of fit, if that step is not saved yet. Keeps the best
// checkpoints, and also the newest. A checkpoint is a folder (checkpoint/checkpoint_writer.h); the link `last` points
// to the newest one and, with a monitor, `best` to the best. Where several callbacks share a folder, the first one
// with a monitor sets `best`, and those that save whole states set `last`.
//   A score belongs to the weights that it was measured on: name and score are determined after the validation, if any,
// that follows the same step. At a step without a validation the metrics of validations are NaN, both as the score and
// in names. A checkpoint whose score is NaN is kept only while it is the newest. (A validation within an accumulation
// window scores the step at the end of the window.) If the monitor is NaN, no checkpoint becomes the best by it, and
// one warning is logged. Of two checkpoints with equal scores the older one counts as better.
//   An older checkpoint is removed once a newer one is complete, but never the one that TrainerOptions::ckpt_path
// names, nor one outside folder().
// Errors: the constructor throws UsageError for options that cannot be used. The names of metrics are known only once
// they are logged: a save throws SetupError if the first validation has not logged the monitor, or if a field of the
// filename is no logged metric.
class ModelCheckpoint final : public Callback {
 public:
  using Options = ModelCheckpointOptions;
  explicit ModelCheckpoint(Options options = {});
  static std::shared_ptr<ModelCheckpoint> make(Options options = {});

  bool runs_in_fast_dev_run() const override { return false; }
  bool runs_last() const override { return true; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_train_start(TrainerControl& trainer) override;
  void on_train_epoch_start(TrainerControl& trainer) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_validation_end(TrainerControl& trainer) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  void on_train_end(TrainerControl& trainer) override;
  void on_checkpoint_saved(TrainerControl& trainer, const std::filesystem::path& folder) override;
  std::string state_key() const override { return changed_fields(options_); }
  State state() const override;
  void load_state(const State& state) override;

  // Called by the Trainer at a step boundary, after the validation that is due there. A checkpoint that is saved here
  // is written at once.
  void on_step_boundary(TrainerControl& trainer);

  // Called by the Trainer after a rollback. `step` is the current step: a score that was measured at it is not that of
  // the restored weights, which are not saved yet.
  void forget(int64_t step);

  // Called by the Trainer before a run: which links this callback sets where several share a folder.
  struct Links {
    bool last = true, best = true;
  };
  void set_links(Links links) { links_ = links; }

  const Options& options() const { return options_; }

  // The folder that has the checkpoints.
  std::filesystem::path folder(TrainerControl& trainer) const;
  const std::filesystem::path& dirpath() const { return options_.dirpath; }  // as given; empty: in the run's folder

  const std::filesystem::path& best_model_path() const { return best().path; }  // empty before the first save
  double best_model_score() const { return best().score; }                      // NaN without monitor

  // The save_top_k best that are kept, with their scores; without monitor the newest one, with the score NaN.
  std::map<std::filesystem::path, double> best_k_models() const;

 private:
  struct Saved {
    std::filesystem::path path;
    double score;
    bool whole;  // complete and on disk
  };

  bool better(double a, double b) const;
  bool is_ranked(const Saved& saved) const;
  bool saves_in(int64_t epoch) const;
  void note_validation(TrainerControl& trainer);
  bool may_lack_metrics(TrainerControl& trainer) const;
  Metrics metrics_now(TrainerControl& trainer) const;
  double score_of(TrainerControl& trainer, const Metrics& metrics);
  void save(TrainerControl& trainer, const Metrics& metrics);
  std::filesystem::path path_for(TrainerControl& trainer, const Metrics& metrics) const;
  std::optional<std::filesystem::path> path_of_saved(const State& saved) const;  // nullopt: it belongs to another run
  const Saved& best() const;

  Options options_;
  Links links_{};
  bool validated_ = false;          // a validation has run in this epoch
  bool just_validated_ = false;     // a validation has ended since the last step boundary
  bool due_ = false;                // the next step boundary is to save
  int64_t batch_ended_at_ = 0;      // optimizer steps at the end of the last batch
  int64_t last_step_ = -1;          // the step of the last save, or of the one that is due
  int64_t scored_step_ = -1;        // the last step for which a validation gave the monitor
  int64_t validated_step_ = -1;     // the last step for which a validation ran
  Metrics validated_metrics_{};     // what the validation at validated_step_ logged
  int64_t epoch_ = -1;              // the last epoch that began in this fit
  bool is_over_ = false;            // training has ended: no further metric will be logged
  bool has_warned_of_nan_ = false;  // the warning of a monitor that is NaN is given once
  std::filesystem::path folder_;    // the checkpoint folder of the running fit
  std::vector<Saved> saved_;        // best first; without monitor, newest first
};

}  // namespace fulgur
