#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <string>

#include "core/callback.h"

namespace fulgur {

struct OnExceptionCheckpointOptions {
  std::filesystem::path dirpath{};        // empty: checkpoints/ in the run's folder
  std::string filename = "on_exception";  // of the checkpoint; "-v1" and so on are appended where it is taken
};

// Saves when fit throws, with what the weights had learned by then. A run that goes on from it begins with the batch
// that failed; its random numbers are not those of a run that did not fail. With several ranks nothing is saved: one of
// them has failed, and they write together. What the failed step left half done in an optimizer stays so.
class OnExceptionCheckpoint final : public Callback {
 public:
  using Options = OnExceptionCheckpointOptions;
  explicit OnExceptionCheckpoint(Options options = {});
  static std::shared_ptr<OnExceptionCheckpoint> make(Options options = {});

  bool runs_last() const override { return true; }
  bool runs_in_fast_dev_run() const override { return false; }
  void on_exception(TrainerControl& trainer, const std::exception& error) override;

 private:
  Options options_;
};

}  // namespace fulgur
