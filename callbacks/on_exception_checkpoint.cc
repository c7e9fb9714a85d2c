#include "callbacks/on_exception_checkpoint.h"

#include <utility>

namespace fulgur {

OnExceptionCheckpoint::OnExceptionCheckpoint(Options options) : options_(std::move(options)) {}

std::shared_ptr<OnExceptionCheckpoint> OnExceptionCheckpoint::make(Options options) {
  return std::make_shared<OnExceptionCheckpoint>(std::move(options));
}

void OnExceptionCheckpoint::on_exception(TrainerControl& trainer, const std::exception&) {
  if (trainer.state().entry_point != EntryPoint::fit) return;
  const std::filesystem::path folder = options_.dirpath.empty() ? trainer.run_dir() / "checkpoints" : options_.dirpath;
  trainer.save_checkpoint(trainer.free_checkpoint_path(folder / options_.filename));
}

}  // namespace fulgur
