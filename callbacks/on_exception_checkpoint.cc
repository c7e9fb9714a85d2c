#include "callbacks/on_exception_checkpoint.h"

#include <fmt/format.h>

#include <utility>

namespace fulgur {

OnExceptionCheckpoint::OnExceptionCheckpoint(Options options) : options_(std::move(options)) {}

std::shared_ptr<OnExceptionCheckpoint> OnExceptionCheckpoint::make(Options options) {
  return std::make_shared<OnExceptionCheckpoint>(std::move(options));
}

void OnExceptionCheckpoint::on_exception(TrainerControl& trainer, const std::exception&) {
  if (trainer.state().entry_point != EntryPoint::fit) return;
  const std::filesystem::path folder = options_.dirpath.empty() ? trainer.run_dir() / "checkpoints" : options_.dirpath;
  const std::filesystem::path wanted = folder / options_.filename;
  std::filesystem::path path = wanted;
  for (int version = 1; std::filesystem::exists(path); ++version)
    path = fmt::format("{}-v{}", wanted.string(), version);
  trainer.save_checkpoint(path);
}

}  // namespace fulgur
