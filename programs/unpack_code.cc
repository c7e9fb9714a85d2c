#include "fulgur/programs/unpack_code.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/memory_map.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

// An absolute path from the environment; XDG's specification says to ignore others.
fs::path path_from(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] == '/' ? fs::path(value) : fs::path();
}

fs::path cache_folder() {
  if (const fs::path cache = path_from("XDG_CACHE_HOME"); !cache.empty()) return cache / "fulgur" / "compiled";
  if (const fs::path home = path_from("HOME"); !home.empty()) return home / ".cache" / "fulgur" / "compiled";
  std::error_code error;
  fs::path temporary = fs::temp_directory_path(error);
  if (error) temporary = "/tmp";
  return temporary / fmt::format("fulgur-compiled-{}", ::geteuid());
}

struct stat status_of(const fs::path& path) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) throw_system_error("look at", path, errno);
  return status;
}

// Throws unless this user alone can read and change what is in the folder.
void check_that_it_is_ours(const fs::path& folder) {
  const struct stat status = status_of(folder);
  if (!S_ISDIR(status.st_mode)) throw CheckpointError(fmt::format("{} is no folder: remove it", folder.string()));
  const std::string_view what = status.st_uid != ::geteuid()                  ? "belongs to another user"
                                : (status.st_mode & (S_IRWXG | S_IRWXO)) != 0 ? "is open to other users"
                                                                              : "";
  if (what.empty()) return;
  throw CheckpointError(fmt::format(
      "{} {}, who could exchange code that is loaded from it: run chmod 700, or remove it", folder.string(), what));
}

// Throws if another user could put a folder of their own in the place of this one. The user's own group may write, as
// some systems have a group for each user.
void check_that_it_stays(const fs::path& folder) {
  std::error_code error;
  fs::path above = fs::canonical(folder, error);
  if (error) throw_system_error("look at", folder, error.value());
  while (above != above.root_path()) {
    above = above.parent_path();
    const struct stat status = status_of(above);
    const bool is_owned = status.st_uid == ::geteuid() || status.st_uid == 0;
    const bool is_open = (status.st_mode & S_IWOTH) != 0 ||
                         ((status.st_mode & S_IWGRP) != 0 && status.st_gid != ::getegid() && status.st_gid != 0);
    if (!is_owned || (is_open && (status.st_mode & S_ISVTX) == 0)) {
      throw CheckpointError(fmt::format("other users can write to {}, and so exchange code that is loaded from {}",
                                        above.string(), folder.string()));
    }
  }
}

void make_folder_of_ours(const fs::path& folder) {
  make_folders(folder.parent_path());
  if (::mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) throw_system_error("create", folder, errno);
  check_that_it_is_ours(folder);
}

bool holds(const fs::path& file, std::string_view bytes) {
  std::error_code error;
  if (!fs::is_regular_file(fs::symlink_status(file, error)) || fs::file_size(file, error) != bytes.size()) return false;
  const auto map = MemoryMap::open(file);
  return std::ranges::equal(map->bytes(), bytes);
}

uint64_t hash_of(const std::map<std::string, std::string_view>& files) {
  uint64_t hash = 0;
  for (const auto& [name, bytes] : files) {
    hash = XXH3_64bits_withSeed(name.data(), name.size() + 1, hash);  // with its final 0
    hash = XXH3_64bits_withSeed(bytes.data(), bytes.size(), hash);
  }
  return hash;
}

}  // namespace

fs::path unpack_code(const std::map<std::string, std::string_view>& files, std::string_view archive) {
  for (const auto& [name, bytes] : files) {
    if (!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos) continue;
    throw CheckpointError(fmt::format("{}: {} is no name of a file: its code would be unpacked elsewhere than in {}",
                                      archive, quote(name), cache_folder().string()));
  }
  try {
    const fs::path all = cache_folder(), folder = all / fmt::format("{:016x}", hash_of(files));
    make_folder_of_ours(all);
    check_that_it_stays(all);
    make_folder_of_ours(folder);
    for (const auto& [name, bytes] : files) {
      const fs::path file = folder / name;
      if (holds(file, bytes)) continue;
      replace_file_atomically(file, [&](FileWriter& writer) { writer.write(bytes.data(), bytes.size()); });
    }
    return folder;
  } catch (const CheckpointError& error) {
    throw CheckpointError(
        fmt::format("{}: its compiled code cannot be unpacked: {}; set XDG_CACHE_HOME to a folder of your "
                    "own, or run without it by --compiled_code=false",
                    archive, error.what()));
  }
}

}  // namespace fulgur
