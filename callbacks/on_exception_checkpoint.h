#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct OnExceptionCheckpointOptions {
  std::filesystem::path dirpath{};  // empty: where ModelCheckpoint saves, otherwise checkpoints/ in the run's folder
  std::string filename = "on_exception";  // "-v1" and so on are appended if the name is taken
  void describe(FieldVisitor& visit);
};

// Saves a checkpoint when fit throws, with the weights at that point, so that a run with ckpt_path = "last" resumes
// from there; the resumed run removes the checkpoint once it has a newer one. The resumed run begins with the batch
// that failed, or, where gradients are accumulated, with the first batch of the accumulation window, whose metrics
// then count twice. Random numbers differ from those of a run that did not fail. With several ranks nothing is saved:
// a checkpoint is written by all ranks, and one of them has failed. Nothing is saved either before there are
// optimizers, or if a signal ends the run and ModelCheckpoint saves. An optimizer step that failed half-way is saved as
// it is.
class OnExceptionCheckpoint final : public Callback {
 public:
  using Options = OnExceptionCheckpointOptions;
  explicit OnExceptionCheckpoint(Options options = {});
  static std::shared_ptr<OnExceptionCheckpoint> make(Options options = {});

  bool runs_last() const override { return true; }
  bool runs_in_fast_dev_run() const override { return false; }
  void on_exception(TrainerControl& trainer, const std::exception& error) override;

  // Called by the Trainer before fit, with the dirpath of the ModelCheckpoint, which may be empty; nullopt: there is
  // none.
  void set_model_checkpoint(const std::optional<std::filesystem::path>& dirpath) { model_checkpoint_ = dirpath; }

 private:
  Options options_;
  std::optional<std::filesystem::path> model_checkpoint_{};
};

}  // namespace fulgur
