#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/callback.h"
#include "core/describe.h"

namespace fulgur {

struct ModelCheckpointOptions {
  std::filesystem::path dirpath{};  // empty: checkpoints/ in the run's folder
  // {epoch}, {step} or a metric, with a format if you like, as in {val_acc:.3f}. This one becomes epoch=3-step=120.
  std::string filename = "{epoch}-{step}";
  std::string monitor{};            // the metric that tells which are best; empty: the newest
  std::string mode = "min";         // min or max: which value of it is better
  int64_t save_top_k = 1;           // how many of the best to keep; -1: all, 0: save none
  int64_t every_n_epochs = 1;       // epochs from one save to the next
  int64_t every_n_train_steps = 0;  // optimizer steps from one save to the next, and not at ends of epochs; 0: off
  bool save_weights_only = false;   // no run can go on from them
  bool async = false;               // write beside the training
  void describe(FieldVisitor& visit);
};

// Saves checkpoints at the end of training epochs (of those that validated, if fit validates), or every so many steps,
// and keeps the best of them, and the newest too. A checkpoint is a folder (checkpoint/checkpoint_writer.h); beside
// them `last` points to the newest one and, with a monitor, `best` to the best. Of equals the older one stays; NaN is
// worse than everything. An older one is removed once the newer one is whole; never the one that the run went on from,
// nor one outside folder(). Options are checked in the constructor: UsageError. Which metrics there are is known only
// once an epoch has logged them: a monitor or filename field that nobody logged ends the run at its first save:
// SetupError.
class ModelCheckpoint final : public Callback {
 public:
  using Options = ModelCheckpointOptions;
  explicit ModelCheckpoint(Options options = {});
  static std::shared_ptr<ModelCheckpoint> make(Options options = {});

  bool runs_in_fast_dev_run() const override { return false; }
  bool runs_last() const override { return true; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_validation_end(TrainerControl& trainer) override;
  void on_train_epoch_end(TrainerControl& trainer) override;
  void on_checkpoint_saved(TrainerControl& trainer, const std::filesystem::path& folder) override;
  State state() const override;
  void load_state(const State& state) override;

  // Where they are.
  std::filesystem::path folder(TrainerControl& trainer) const;

  const std::filesystem::path& best_model_path() const { return best().path; }  // empty before the first save
  double best_model_score() const { return best().score; }                      // NaN without monitor

 private:
  struct Saved {
    std::filesystem::path path;
    double score;
    bool whole;  // it is on disk
  };

  bool better(double a, double b) const;
  double score(TrainerControl& trainer) const;
  void save(TrainerControl& trainer);
  std::filesystem::path path_for(TrainerControl& trainer) const;
  std::optional<std::filesystem::path> path_of_saved(const State& saved) const;  // nothing: it is another run's
  const Saved& best() const;

  Options options_;
  bool validated_ = false;        // in this epoch
  int64_t last_step_ = 0;         // of the last save by every_n_train_steps
  std::filesystem::path folder_;  // of the running fit
  std::vector<Saved> saved_;      // best first; without monitor, newest first
};

}  // namespace fulgur
