#include "fulgur/checkpoint/formats/huggingface.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = 64 << 20;

// Collects tensors under the names that the map gives them.
class Renamed {
 public:
  explicit Renamed(const NameMap& names) : names_(names) {}

  void add(const SafetensorsFile& file, const std::string& name) {
    const auto renamed = names_(name);
    if (!renamed) return;
    const auto [other, is_new] = original_names_.emplace(*renamed, name);
    if (!is_new) {
      throw CheckpointError(fmt::format("{}: tensors {} and {} both become {}", file.path().string(),
                                        quote(other->second), quote(name), quote(*renamed)));
    }
    tensors_.emplace_back(*renamed, file.tensor(name));
  }

  NamedTensors tensors() && { return std::move(tensors_); }

 private:
  const NameMap& names_;
  std::map<std::string, std::string> original_names_;  // by new name
  NamedTensors tensors_;
};

// The name of the file that holds each tensor, by tensor name.
std::map<std::string, std::string> read_index(const fs::path& index) {
  const auto json = parse_json(read_text_file(index, kMaxIndexBytes), index.string(), {.max_depth = 16});
  const auto fail = [&](const std::string& reason) {
    throw CheckpointError(fmt::format("{}: {}", index.string(), reason));
  };
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) fail("has no weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) fail(fmt::format("the file of {} is no text", quote(tensor)));
    const auto name = file.get<std::string>();
    if (name.empty() || fs::path(name).filename() != name || name == "..") {
      fail(fmt::format("{} is not the name of a file beside it", quote(name)));
    }
    files.emplace(tensor, name);
  }
  return files;
}

NamedTensors read_parts(const fs::path& index, const NameMap& names) {
  std::map<std::string, SafetensorsFile> parts;
  Renamed renamed(names);
  for (const auto& [tensor, name] : read_index(index)) {
    auto part = parts.find(name);
    if (part == parts.end()) part = parts.emplace(name, SafetensorsFile(index.parent_path() / name)).first;
    renamed.add(part->second, tensor);
  }
  return std::move(renamed).tensors();
}

NamedTensors read_file(const fs::path& path, const NameMap& names) {
  const SafetensorsFile file(path);
  Renamed renamed(names);
  for (const SafetensorsEntry& entry : file.entries()) renamed.add(file, entry.name);
  return std::move(renamed).tensors();
}

}  // namespace

NamedTensors read_huggingface(const fs::path& path, const NameMap& names) {
  if (!fs::is_directory(path)) return path.extension() == ".json" ? read_parts(path, names) : read_file(path, names);
  if (fs::exists(path / kIndexName)) return read_parts(path / kIndexName, names);
  return read_file(path / "model.safetensors", names);
}

}  // namespace fulgur
