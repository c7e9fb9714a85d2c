#include "fulgur/trainer/find_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/require_checkpoint.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> checkpoints_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const bool is_being_saved = is_temporary_name(entry.path().filename().string());
    if (!entry.is_symlink() && !is_being_saved && is_checkpoint(entry.path())) found.push_back(entry.path());
  }
  return found;
}

// The checkpoint that `last` points to; the newest one if the process ended before it could make `last`.
std::optional<fs::path> last_in(const fs::path& folder) {
  if (is_checkpoint(folder / "last")) return fs::canonical(folder / "last");
  const std::vector<fs::path> found = checkpoints_in(folder);
  const auto written = [](const fs::path& path) { return fs::last_write_time(path / kManifestName); };
  const auto newest = std::ranges::max_element(found, {}, written);
  return newest == found.end() ? std::nullopt : std::optional(*newest);
}

[[noreturn]] void throw_no_run(const std::string& name) {
  throw UsageError(
      fmt::format("ckpt_path = '{}', but this Trainer has no run in whose folder to look for it; write the folder of a "
                  "checkpoint, or set name, or dirpath of ModelCheckpoint",
                  name));
}

}  // namespace

std::optional<fs::path> find_checkpoint(const std::string& ckpt_path, const std::vector<fs::path>& folders,
                                        bool is_needed) {
  if (ckpt_path.empty()) return std::nullopt;
  if (is_checkpoint(ckpt_path)) return fs::canonical(ckpt_path);  // `last` may move
  const std::string name = canonical_name(ckpt_path);
  if (name == "last") {
    for (const fs::path& folder : folders) {
      if (const auto last = last_in(folder)) return last;
    }
    if (!is_needed) return std::nullopt;
    if (folders.empty()) throw_no_run(name);
    throw UsageError(fmt::format("ckpt_path = 'last', but there is no checkpoint in '{}'; write the folder of one",
                                 folders.front().string()));
  }
  if (name == "best") {
    for (const fs::path& folder : folders) {
      if (is_checkpoint(folder / "best")) return fs::canonical(folder / "best");
    }
    if (folders.empty()) throw_no_run(name);
    throw UsageError(
        fmt::format("ckpt_path = 'best', but no checkpoint is marked as best in '{}': nothing was saved there, "
                    "ModelCheckpoint has no monitor, or its monitor was always NaN; write 'last' or a folder",
                    folders.front().string()));
  }
  try {
    require_checkpoint(ckpt_path);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("ckpt_path: {}", error.what()));
  }
  return ckpt_path;
}

}  // namespace fulgur
