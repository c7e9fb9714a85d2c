#include "fulgur/checkpoint/require_checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/manifest.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> folders_in(const fs::path& parent) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent.empty() ? "." : parent, error)) {
    if (entry.is_directory(error) && !is_temporary_name(entry.path().filename().string())) {
      found.push_back(parent / entry.path().filename());
    }
  }
  std::ranges::sort(found);
  return found;
}

// The checkpoint among the folders in `parent` that somebody who named `parent` may have meant: last, best, or any.
std::optional<fs::path> checkpoint_in(const fs::path& parent) {
  for (const char* name : {"last", "best"}) {
    if (is_checkpoint(parent / name)) return parent / name;
  }
  const std::vector<fs::path> folders = folders_in(parent);
  const auto found = std::ranges::find_if(folders, is_checkpoint);
  return found == folders.end() ? std::nullopt : std::optional(*found);
}

[[noreturn]] void refuse_file(const fs::path& file) {
  const std::string name = file.string(), extension = file.extension().string();
  const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
  if (is_checkpoint(folder)) {
    throw UsageError(
        fmt::format("'{}' is a file of a checkpoint; did you mean its folder, '{}'?", name, folder.string()));
  }
  const bool is_of_torch = extension == ".pt" || extension == ".pth" || extension == ".ckpt";
  if (!is_of_torch && extension != ".safetensors") {
    throw UsageError(
        fmt::format("'{}' is a file, and a checkpoint is a folder, such as runs/version_0/checkpoints/last", name));
  }
  throw UsageError(
      fmt::format("'{0}' is a file of weights, and a checkpoint is a folder; a program takes weights of Python by "
                  "load_weights(*model, {1}(\"{0}\"), \"{0}\"), see docs/recipes.md",
                  name, is_of_torch ? "read_torch_file" : "read_huggingface"));
}

[[noreturn]] void refuse_missing(const fs::path& path) {
  const fs::path parent = path.parent_path();
  std::vector<std::string> names, checkpoints;
  for (const fs::path& folder : folders_in(parent)) {
    names.push_back(folder.filename().string());
    if (is_checkpoint(folder)) checkpoints.push_back(names.back());
  }
  std::string hint;
  if (const auto nearest = nearest_name(path.filename().string(), names)) {
    hint = fmt::format("; did you mean '{}'?", (parent / *nearest).string());
  } else if (!checkpoints.empty()) {
    hint = fmt::format("; '{}' has {}", parent.string(), fmt::join(checkpoints, ", "));
  }
  throw UsageError(fmt::format("there is no checkpoint '{}'{}", path.string(), hint));
}

}  // namespace

void require_checkpoint(fs::path path) {
  if (!path.has_filename()) path = path.parent_path();  // runs/a/
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (is_checkpoint(path)) return;
  if (type == fs::file_type::not_found) refuse_missing(path);
  if (type == fs::file_type::regular) refuse_file(path);
  if (type != fs::file_type::directory) return;
  const std::string name = path.string();
  if (const auto found = checkpoint_in(path / "checkpoints")) {
    throw UsageError(fmt::format("'{}' is the folder of a run; did you mean '{}'?", name, found->string()));
  }
  if (const auto found = checkpoint_in(path)) {
    throw UsageError(fmt::format("'{}' is a folder of checkpoints; did you mean '{}'?", name, found->string()));
  }
  if (fs::exists(path / "checkpoints", error)) {
    throw UsageError(fmt::format("'{}' is the folder of a run that has no checkpoint", name));
  }
  throw UsageError(fmt::format("'{}' is no checkpoint: it has no {}", name, kManifestName));
}

}  // namespace fulgur
