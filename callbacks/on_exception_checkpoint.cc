#include "fulgur/callbacks/on_exception_checkpoint.h"

#include <filesystem>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {

void OnExceptionCheckpointOptions::describe(FieldVisitor& visit) {
  visit({.name = "dirpath", .help = "folder; empty: where ModelCheckpoint saves"}, &dirpath);
  visit({.name = "filename", .help = "name of the checkpoint, to which -v1, -v2 are appended if it is taken"},
        &filename);
}

OnExceptionCheckpoint::OnExceptionCheckpoint(Options options) : options_(std::move(options)) {}

std::shared_ptr<OnExceptionCheckpoint> OnExceptionCheckpoint::make(Options options) {
  return std::make_shared<OnExceptionCheckpoint>(std::move(options));
}

void OnExceptionCheckpoint::on_exception(TrainerControl& trainer, const std::exception& error) {
  if (trainer.state().entry_point != EntryPoint::fit || trainer.optimizers().empty()) return;  // nothing is trained yet
  const bool was_saved = model_checkpoint_ && dynamic_cast<const InterruptedError*>(&error) != nullptr;
  if (was_saved) return;
  std::filesystem::path folder = options_.dirpath;
  if (folder.empty() && model_checkpoint_) folder = *model_checkpoint_;
  if (folder.empty()) folder = trainer.run_dir() / "checkpoints";
  trainer.save_checkpoint(trainer.free_checkpoint_path(folder / options_.filename), {.links = {"last"}});
}

}  // namespace fulgur
