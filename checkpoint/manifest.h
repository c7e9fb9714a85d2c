#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/file_system.h"

namespace fulgur {

constexpr const char* kManifestName = "manifest.json";

// What a checkpoint consists of: manifest.json, which is written last. A folder without one is no checkpoint.
struct Manifest {
  static constexpr int64_t kFormatVersion = 1;

  struct File {
    std::string name;  // in the folder of the manifest: no '/'
    int64_t num_bytes = 0;
    uint64_t xxh3 = 0;
    bool operator==(const File&) const = default;
  };
  struct Parameter {
    std::string name;
    std::string dtype;  // as safetensors names it: "F32"
    std::vector<int64_t> shape;
    std::string alias_of;  // the parameter that it shares its elements with; empty if it has its own
    bool operator==(const Parameter&) const = default;
  };
  // Where the optimizer state of elements [begin, end) of a parameter is, in the order of its memory. Those of one
  // parameter cover all of its elements once, or there are none. Never empty; an alias has none.
  struct Range {
    std::string parameter;
    int64_t begin = 0, end = 0;
    std::string file;
    bool operator==(const Range&) const = default;
  };

  int64_t world_size = 1;   // ranks of the run that wrote it
  std::vector<File> files;  // all but the manifest
  std::vector<Parameter> parameters;
  std::vector<Range> ranges;

  const File* find_file(std::string_view name) const;            // null if there is none
  const Parameter* find_parameter(std::string_view name) const;  // null if there is none
  bool operator==(const Manifest&) const = default;
};

// Human-readable JSON. Throws CheckpointError for what parse_manifest() would refuse.
std::string to_json(const Manifest& manifest);

// Throws CheckpointError, naming `file` and the reason, if the text is no manifest, contradicts itself or was written
// by a later version of the format; an older one is brought up to date.
Manifest parse_manifest(std::string_view text, std::string_view file);

bool is_checkpoint(const std::filesystem::path& folder);  // has a manifest
Manifest read_manifest(const std::filesystem::path& folder);
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);  // a new file, synced

struct VerifyOptions {
  bool digests = true;  // read all bytes and compare their hash; otherwise only that each file is there with its size
  std::function<void(int64_t)> on_read{};  // told how many bytes of a file have been read so far
};

// Nothing if the file in `folder` is as the manifest says, else what is wrong with it: "model.safetensors has 12 bytes,
// the manifest says 16".
std::optional<std::string> find_damage(const std::filesystem::path& folder, const Manifest::File& file,
                                       VerifyOptions options = {});

// Throws one CheckpointError that names every file that is missing or damaged.
void verify(const std::filesystem::path& folder, const Manifest& manifest, VerifyOptions options = {});

}  // namespace fulgur
