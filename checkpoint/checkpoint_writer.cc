#include "fulgur/checkpoint/checkpoint_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/version.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/layout.h"
#include "fulgur/checkpoint/limits.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/state_json.h"
#include "fulgur/distributed/rank_messages.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The results of `work` on all ranks; if it throws on one rank, all ranks throw.
std::vector<std::string> on_all_ranks(Collective& group, const std::function<std::string()>& work) {
  constexpr char kFailed = '!', kDone = '.';
  std::exception_ptr failure;
  std::string own;
  try {
    own = kDone + work();
  } catch (...) {
    failure = std::current_exception();
    own = kFailed + text_of(failure);
  }
  std::vector<std::string> results = all_gather_bytes(group, own);
  if (failure != nullptr) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (results[rank].front() == kFailed)
      throw CheckpointError(fmt::format("rank {}: {}", rank, results[rank].substr(1)));
    results[rank].erase(0, 1);
  }
  return results;
}

Manifest::File described(const std::string& name, const FileDigest& digest) {
  return {.name = name, .num_bytes = digest.num_bytes, .xxh3 = digest.xxh3};
}

// Writes and syncs a safetensors file in the temporary folder.
Manifest::File write_tensors(const fs::path& folder, const std::string& name, const NamedTensors& tensors,
                             const std::map<std::string, std::string>& metadata) {
  FileWriter file(folder / name);
  write_safetensors(file, tensors, metadata);
  return described(name, file.sync_and_close());
}

// Writes the rank's own file; nullopt if the rank has nothing to write.
std::optional<Manifest::File> write_rank_file(const fs::path& folder, const CheckpointContent& content, int64_t rank,
                                              int64_t world_size) {
  if (content.ranges.empty() && content.rank.empty()) return std::nullopt;
  NamedTensors tensors, own;
  for (const StateRange& range : content.ranges) {
    for (const auto& [name, tensor] : range.tensors) {
      tensors.emplace_back(layout::to_string({range.parameter, name, range.begin, range.end}), tensor);
    }
  }
  const std::string state = state_to_json(content.rank, own);
  for (auto& [name, tensor] : own) tensors.emplace_back(layout::kRankPrefix + name, tensor);
  return write_tensors(folder, layout::rank_file(rank, world_size), tensors, {{layout::kRankState, state}});
}

std::vector<Manifest::File> write_shared_files(const fs::path& folder, const CheckpointContent& content) {
  std::vector<Manifest::File> files;
  files.push_back(write_tensors(folder, layout::kWeights, content.weights, {{"format", "pt"}}));
  NamedTensors tensors;
  const std::string state = state_to_json(content.run, tensors);
  files.push_back(
      described(layout::kRunState, write_text_file(folder / layout::kRunState, state, limits::kRunStateBytes)));
  if (!tensors.empty()) files.push_back(write_tensors(folder, layout::kRunTensors, tensors, {}));
  return files;
}

// Writes the files of this rank and describes them as JSON for rank 0.
std::string write_part(const fs::path& folder, const CheckpointContent& content, Collective& group) {
  std::vector<Manifest::File> files;
  if (group.rank() == 0) files = write_shared_files(folder, content);
  if (const auto file = write_rank_file(folder, content, group.rank(), group.world_size())) files.push_back(*file);
  Json part{{"files", Json::array()}, {"ranges", Json::array()}};
  for (const auto& file : files) part["files"].push_back({file.name, file.num_bytes, file.xxh3});
  for (const auto& range : content.ranges) part["ranges"].push_back({range.parameter, range.begin, range.end});
  return part.dump();
}

Manifest manifest_of(const CheckpointContent& content, const std::vector<std::string>& parts) {
  Manifest manifest{.fulgur_version = std::string(version()),
                    .world_size = static_cast<int64_t>(parts.size()),
                    .files = {},
                    .parameters = {},
                    .ranges = {}};
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const Json part = Json::parse(parts[rank]);
    for (const Json& file : part.at("files")) {
      manifest.files.push_back({.name = file[0], .num_bytes = file[1], .xxh3 = file[2]});
    }
    for (const Json& range : part.at("ranges")) {
      manifest.ranges.push_back({.parameter = range[0],
                                 .begin = range[1],
                                 .end = range[2],
                                 .file = layout::rank_file(static_cast<int64_t>(rank), manifest.world_size)});
    }
  }
  for (const auto& [name, tensor] : content.weights) {
    manifest.parameters.push_back({.name = name,
                                   .dtype = std::string(safetensors_dtype(tensor.scalar_type())),
                                   .shape = tensor.sizes().vec(),
                                   .alias_of = {}});
  }
  for (const auto& [name, original] : content.aliases) {
    Manifest::Parameter alias = *manifest.find_parameter(original);
    alias.name = name;
    alias.alias_of = original;
    manifest.parameters.push_back(std::move(alias));
  }
  return manifest;
}

at::Tensor copy_on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor.detach().clone() : tensor.detach().cpu();
}

void make_independent(State& state) {
  State independent;
  for (const auto& [name, value] : state.values()) {
    const auto* tensor = std::get_if<at::Tensor>(&value);
    tensor == nullptr ? independent.set(name, value) : independent.set(name, copy_on_host(*tensor));
  }
  state = std::move(independent);
}

}  // namespace

void make_independent(CheckpointContent& content) {
  for (auto& [name, tensor] : content.weights) tensor = copy_on_host(tensor);
  for (StateRange& range : content.ranges) {
    for (auto& [name, tensor] : range.tensors) tensor = copy_on_host(tensor);
  }
  make_independent(content.run);
  make_independent(content.rank);
}

void write_checkpoint(const fs::path& folder, const CheckpointContent& content, Collective& group,
                      const std::vector<std::string>& links) {
  group.barrier();  // reports a rank that makes another call, before the exchange of bytes could take part in that call
  const bool is_first = group.rank() == 0;
  std::optional<TemporaryFolder> made;    // on rank 0
  std::optional<TemporaryName> borrowed;  // on the other ranks
  const std::string temporary = on_all_ranks(group, [&] {
    if (is_first) made.emplace(folder);
    return is_first ? made->path().string() : "";
  })[0];
  const std::vector<std::string> parts = on_all_ranks(group, [&] {
    if (!is_first) borrowed.emplace(TemporaryName::share(temporary));
    return write_part(temporary, content, group);
  });
  on_all_ranks(group, [&]() -> std::string {
    if (!is_first) return "";
    write_manifest(temporary, manifest_of(content, parts));
    made->commit();
    for (const std::string& link : links) replace_link_atomically(folder.parent_path() / link, folder.filename());
    return "";
  });
}

}  // namespace fulgur
