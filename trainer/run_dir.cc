#include "fulgur/trainer/run_dir.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/checkpoint/file_system.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "version_";

fs::path runs_in(const fs::path& root) { return (root.empty() ? working_directory() : root) / "runs"; }

// The numbers N of the folders version_N, the newest first.
std::vector<int64_t> versions_in(const fs::path& runs) {
  std::vector<int64_t> versions;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(runs, error)) {
    const std::string name = entry.path().filename().string();
    int64_t version = 0;
    if (!name.starts_with(kPrefix)) continue;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), version);
    versions.push_back(version);
  }
  std::ranges::sort(versions, std::greater());
  return versions;
}

}  // namespace

std::vector<fs::path> checkpoint_folders_of_runs(const fs::path& root) {
  std::vector<std::pair<fs::file_time_type, fs::path>> folders;
  std::error_code error;
  for (const auto& run : fs::directory_iterator(runs_in(root), error)) {
    const fs::path folder = run.path() / "checkpoints";
    const auto time = fs::last_write_time(folder, error);
    if (!error && !run.is_symlink()) folders.emplace_back(time, folder);
  }
  std::ranges::sort(folders, std::greater());
  std::vector<fs::path> paths;
  for (auto& [time, folder] : folders) paths.push_back(std::move(folder));
  return paths;
}

fs::path named_run_dir(const fs::path& root, const std::string& name) {
  if (fs::path(name).filename() != name || name == "." || name == "..") {
    throw UsageError(fmt::format("name = '{}' is to be the name of a folder in runs/; leave '/' and '..' out", name));
  }
  return runs_in(root) / name;
}

fs::path make_named_run_dir(const fs::path& root, const std::string& name) {
  const fs::path folder = named_run_dir(root, name);
  make_folders(folder);
  return folder;
}

fs::path make_run_dir(const fs::path& root) {
  const fs::path runs = runs_in(root);
  make_folders(runs);
  const std::vector<int64_t> versions = versions_in(runs);
  for (int64_t version = versions.empty() ? 0 : versions.front() + 1;;) {
    const fs::path folder = runs / fmt::format("{}{}", kPrefix, version);
    std::error_code error;
    if (fs::create_directory(folder, error)) {
      sync_folder(runs);
      return folder;
    }
    if (error == std::errc::no_such_file_or_directory) {
      make_folders(runs);  // a run that had left nothing in it has removed it
    } else if (error) {
      throw fs::filesystem_error("cannot make the folder of a run", folder, error);
    } else {
      ++version;  // another process was first
    }
  }
}

}  // namespace fulgur
