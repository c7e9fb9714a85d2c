#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/checkpoint/file_system.h"

namespace fulgur {

constexpr const char* kManifestName = "manifest.json";

// The table of contents of a checkpoint, manifest.json, written last. A folder without a manifest is no checkpoint.
struct Manifest {
  static constexpr int64_t kFormatVersion = 1;

  struct File {
    std::string name;  // in the folder of the manifest, without '/'
    int64_t num_bytes = 0;
    uint64_t xxh3 = 0;
    bool operator==(const File&) const = default;
  };
  struct Parameter {
    std::string name;
    std::string dtype;  // as safetensors names it: "F32"
    std::vector<int64_t> shape;
    std::string alias_of;  // name of the parameter that has the elements; empty if the parameter has its own
    bool operator==(const Parameter&) const = default;
  };
  // Which file has the optimizer state of elements [begin, end) of a parameter, counted in memory order. The ranges of
  // one parameter cover all its elements exactly once, or there are none. A range is never empty; an alias has no
  // ranges.
  struct Range {
    std::string parameter;
    int64_t begin = 0, end = 0;
    std::string file;
    bool operator==(const Range&) const = default;
  };

  std::string fulgur_version{};  // version of the fulgur that wrote it; empty: older than 0.1.0
  int64_t world_size = 1;        // number of ranks of the run that wrote the checkpoint
  std::vector<File> files;       // all files except the manifest
  std::vector<Parameter> parameters;
  std::vector<Range> ranges;

  const File* find_file(std::string_view name) const;            // null if there is none
  const Parameter* find_parameter(std::string_view name) const;  // null if there is none
  bool operator==(const Manifest&) const = default;
};

// Human-readable JSON. Throws CheckpointError for what parse_manifest() would refuse.
std::string to_json(const Manifest& manifest);

// Throws CheckpointError, naming `file` and the reason, if the text is no manifest, contradicts itself or was written
// by a later version of the format; an older format is migrated.
Manifest parse_manifest(std::string_view text, std::string_view file);

bool is_checkpoint(const std::filesystem::path& folder);  // true if the folder has a manifest
Manifest read_manifest(const std::filesystem::path& folder);
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);  // writes a new file and syncs it

struct VerifyOptions {
  bool digests = true;  // read all bytes and compare their hash; false: check only existence and size of each file
  std::function<void(int64_t)> on_read{};  // gets the number of bytes of the file read so far
};

// Returns what is wrong with the file in `folder`, such as "model.safetensors has 12 bytes, the manifest says 16";
// nullopt if the file matches the manifest.
std::optional<std::string> find_damage(const std::filesystem::path& folder, const Manifest::File& file,
                                       VerifyOptions options = {});

// Throws one CheckpointError that names every file that is missing or damaged.
void verify(const std::filesystem::path& folder, const Manifest& manifest, VerifyOptions options = {});

}  // namespace fulgur
