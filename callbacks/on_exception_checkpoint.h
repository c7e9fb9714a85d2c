#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "core/callback.h"

namespace fulgur {

struct OnExceptionCheckpointOptions {
  std::filesystem::path dirpath{};  // empty: where ModelCheckpoint saves, otherwise checkpoints/ in the run's folder
  std::string filename = "on_exception";  // of the checkpoint; "-v1" and so on are appended where it is taken
};

// Saves when fit throws, with what the weights had learned by then, so that a run with ckpt_path = "last" resumes from
// there; that run removes the checkpoint when it has a newer one. It begins with the batch that failed, or, where
// gradients are accumulated, with the first batch of that batch's window, whose metrics then count twice. Its random
// numbers are not those of a run that did not fail. With several ranks nothing is saved: one of them has failed, and
// they write together. Nothing is saved either where a signal ends the run and ModelCheckpoint saves. What the failed
// step left half done in an optimizer stays so.
class OnExceptionCheckpoint final : public Callback {
 public:
  using Options = OnExceptionCheckpointOptions;
  explicit OnExceptionCheckpoint(Options options = {});
  static std::shared_ptr<OnExceptionCheckpoint> make(Options options = {});

  bool runs_last() const override { return true; }
  bool runs_in_fast_dev_run() const override { return false; }
  void on_exception(TrainerControl& trainer, const std::exception& error) override;

  // The Trainer calls it before fit: the dirpath of its ModelCheckpoint, which may be empty; nullopt: it has none.
  void set_model_checkpoint(const std::optional<std::filesystem::path>& dirpath) { model_checkpoint_ = dirpath; }

 private:
  Options options_;
  std::optional<std::filesystem::path> model_checkpoint_{};
};

}  // namespace fulgur
