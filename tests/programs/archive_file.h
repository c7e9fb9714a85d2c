#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "fulgur/checkpoint/formats/write_archive.h"
#include "fulgur/checkpoint/formats/zip_directory.h"
#include "tests/testing/temp_dir.h"

namespace fulgur::testing {

// The file of an archive in tests/programs/archives/: "mlp".
inline std::filesystem::path archive_path(const std::string& name) {
  return "tests/programs/archives/" + name + ".pt2";
}

// The entries of an archive, for a test to change and to write to a file of its own.
class ArchiveFile {
 public:
  using Change = std::function<void(nlohmann::json&)>;

  explicit ArchiveFile(const std::string& name) {
    const std::string file = archive_path(name).string(), bytes = read_file(file);
    const auto read = [&](uint64_t begin, uint64_t num_bytes) { return bytes.substr(begin, num_bytes); };
    for (const ZipEntry& entry : read_zip_directory(read, bytes.size(), file)) {
      const std::string below = entry.name.substr(entry.name.find('/') + 1);
      if (below.starts_with(".data/")) continue;  // the writer's own
      entries[below] = bytes.substr(zip_entry_begin(entry, read, bytes.size(), file), entry.num_bytes);
    }
  }

  ArchiveFile& change(const std::string& entry, const Change& change) {
    nlohmann::json json = nlohmann::json::parse(entries.at(entry));
    change(json);
    entries[entry] = json.dump();
    return *this;
  }
  ArchiveFile& change_program(const Change& change_it) { return change("models/model.json", change_it); }
  ArchiveFile& change_weights(const Change& change_it) {
    return change("data/weights/model_weights_config.json", [&](nlohmann::json& json) { change_it(json["config"]); });
  }

  const std::filesystem::path& write(const std::filesystem::path& file) const {
    write_archive(file, [&](caffe2::serialize::PyTorchStreamWriter& archive) {
      for (const auto& [name, bytes] : entries) archive.writeRecord(name, bytes.data(), bytes.size());
    });
    return file;
  }

  std::map<std::string, std::string> entries;  // by their names below the archive's folder
};

// The node of a graph that has the name; every test names one that is there.
inline nlohmann::json& node_of(nlohmann::json& program, const std::string& name) {
  nlohmann::json& nodes = program["graph_module"]["graph"]["nodes"];
  for (nlohmann::json& node : nodes) {
    if (node["name"] == name) return node;
  }
  throw std::out_of_range(name);
}

// The argument of a node that has the name: {"as_int": 3}.
inline nlohmann::json& argument_of(nlohmann::json& program, const std::string& node, const std::string& name) {
  for (nlohmann::json& input : node_of(program, node)["inputs"]) {
    if (input["name"] == name) return input["arg"];
  }
  throw std::out_of_range(node + "." + name);
}

}  // namespace fulgur::testing
