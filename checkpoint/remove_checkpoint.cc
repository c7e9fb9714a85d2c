#include "fulgur/checkpoint/remove_checkpoint.h"

#include <fmt/ranges.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/manifest.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

fs::path without_links(const fs::path& path) {
  std::error_code error;
  const fs::path resolved = fs::canonical(path, error);
  if (error) throw_system_error("find", path, error.value());
  return resolved;
}

void remove_file(const fs::path& file) {
  std::error_code error;
  fs::remove(file, error);
  if (error) throw_system_error("remove", file, error.value());
}

// Names of the folder's entries that the manifest does not list.
std::vector<std::string> foreign_names(const fs::path& folder, const Manifest& manifest) {
  std::vector<std::string> names;
  for (const fs::path& entry : list_folder(folder)) {
    const std::string name = entry.filename().string();
    if (name != kManifestName && manifest.find_file(name) == nullptr) names.push_back(name);
  }
  return names;
}

void remove_files(const fs::path& folder, const Manifest& manifest) {
  remove_file(folder / kManifestName);
  sync_folder(folder);
  for (const Manifest::File& file : manifest.files) remove_file(folder / file.name);
}

// The rename hides the checkpoint in one step; if the process ends here, the next save or removal deletes the rest.
void move_away_and_remove(const fs::path& folder, const Manifest& manifest) {
  const TemporaryName temporary = TemporaryName::make(folder.parent_path());
  if (std::rename(folder.c_str(), temporary.path().c_str()) != 0) throw_system_error("rename", folder, errno);
  sync_folder(folder.parent_path());
  remove_files(temporary.path(), manifest);
}

}  // namespace

void remove_checkpoint(const fs::path& checkpoint) {
  const Manifest manifest = read_manifest(checkpoint);
  const fs::path folder = without_links(checkpoint);
  const std::vector<std::string> foreign = foreign_names(folder, manifest);
  if (foreign.empty()) return move_away_and_remove(folder, manifest);
  remove_files(folder, manifest);
  log_warning("'{}' is no checkpoint any more, but stays: it holds {}, which fulgur has not written", folder.string(),
              fmt::join(foreign, ", "));
}

}  // namespace fulgur
