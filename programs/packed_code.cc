#include "fulgur/programs/packed_code.h"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "fulgur/base/compiled_code.h"
#include "fulgur/base/cuda_kernels.h"
#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/programs/loaded_code.h"
#include "fulgur/programs/unpack_code.h"

namespace fulgur {
namespace {

constexpr const char* kDevice = "AOTI_DEVICE_KEY";

// Number of copies of a model on a GPU. Each copy loads its kernels at its first run, and is busy until the GPU has
// done the run.
constexpr size_t kModelsOnGpu = 4;

// Whether the processor has the instructions that Inductor calls so: "AVX512", "AVX512_VNNI".
bool has_instructions([[maybe_unused]] std::string_view name) {
#if defined(__x86_64__)
  if (name == "AVX2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (name == "AVX512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (name == "AVX512_VNNI") return __builtin_cpu_supports("avx512vnni");
  if (name == "AMX_TILE") return __builtin_cpu_supports("amx-tile");
  return name == "INVALID_VEC_ISA";  // Inductor found none that it knows
#else
  return true;
#endif
}

std::string machine() {
#if defined(__x86_64__)
  return "x86_64";
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "another processor";
#endif
}

// The one file whose name ends so.
const std::string& only_file(const std::map<std::string, std::string_view>& files, std::string_view ending,
                             const std::string& archive) {
  const std::string* found = nullptr;
  for (const auto& [name, bytes] : files) {
    if (!name.ends_with(ending)) continue;
    if (found != nullptr)
      throw CheckpointError(fmt::format("{}: has two files of code, {} and {}", archive, *found, name));
    found = &name;
  }
  if (found == nullptr) throw CheckpointError(fmt::format("{}: has no compiled code ({})", archive, ending));
  return *found;
}

}  // namespace

std::string why_not_on_capability(int compiled_for, int own) {
  const bool is_known = compiled_for != 0 && own != 0;
  const bool runs_on_later_ones = compiled_for < 90;
  const bool runs = runs_on_later_ones ? compiled_for / 10 == own / 10 && compiled_for <= own : compiled_for == own;
  if (!is_known || runs) return "";
  return fmt::format("was compiled for GPUs of compute capability {}.{}, but this one has {}.{}: compile it here",
                     compiled_for / 10, compiled_for % 10, own / 10, own % 10);
}

PackedCode::PackedCode(std::filesystem::path archive, const ArchiveEntries& entries, const std::string& model)
    : archive_(std::move(archive)) {
  const std::string folder = fmt::format("data/aotinductor/{}/", model);
  for (auto it = entries.lower_bound(folder); it != entries.end() && it->first.starts_with(folder); ++it) {
    files_.emplace(it->first.substr(folder.size()), it->second);
  }
  std::erase_if(files_, [](const auto& file) { return file.first.ends_with(".cpp"); });  // what it was made of
  const auto is_weights = [](const auto& file) { return file.first.ends_with(".blob"); };
  if (const auto weights = std::ranges::find_if(files_, is_weights); weights != files_.end()) {
    throw CheckpointError(
        fmt::format("{}: its weights are in a file of their own, {}, which is not read; package it without "
                    "aot_inductor.package_constants_on_disk_format",
                    archive_.string(), weights->first));
  }
  library_ = only_file(files_, ".so", archive_.string());
  const std::string& metadata = only_file(files_, ".wrapper_metadata.json", archive_.string());
  const std::string where = fmt::format("{}: {}", archive_.string(), metadata);
  try {
    metadata_ = parse_json(files_.at(metadata), where).get<std::map<std::string, std::string>>();
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(fmt::format("{}: {}", where, error.what()));
  }
  if (!metadata_.contains(kDevice)) throw CheckpointError(fmt::format("{}: has no {}", where, kDevice));
}

std::string PackedCode::why_not_on(c10::Device device) const {
  if (!is_compiled_code_allowed()) return "is native code, which is not allowed here (--compiled_code=false)";
  const auto value = [this](const char* key) {
    const auto found = metadata_.find(key);
    return found == metadata_.end() ? "" : found->second;
  };
  const std::string needed_device = metadata_.at(kDevice);
  if (needed_device != c10::DeviceTypeName(device.type(), /*lower_case=*/true)) {
    return fmt::format("was compiled for {}, but is to run on {}", needed_device, device.str());
  }
  if (const std::string other = value("AOTI_MACHINE"); !other.empty() && other != machine()) {
    return fmt::format("was compiled for {}, but this machine is {}: compile it here", other, machine());
  }
  int compiled_for = 0;
  const std::string capability = value("AOTI_COMPUTE_CAPABILITY");
  std::from_chars(capability.data(), capability.data() + capability.size(), compiled_for);
  if (std::string reason = why_not_on_capability(compiled_for, compute_capability(device)); !reason.empty()) {
    return reason;
  }
  const std::string instructions = value("AOTI_CPU_ISA");
  for (size_t begin = 0; begin < instructions.size();) {
    const size_t end = std::min(instructions.find(' ', begin), instructions.size());
    const std::string name = instructions.substr(begin, end - begin);
    if (!has_instructions(name)) {
      return fmt::format("was compiled for processors with {}, which this one does not have: compile it here", name);
    }
    begin = end + 1;
  }
  return "";
}

std::unique_ptr<LoadedCode> PackedCode::load_for_one_thread(c10::Device device) const { return load(device, 1); }

std::unique_ptr<LoadedCode> PackedCode::load_for_any_thread(c10::Device device) const {
  return load(device, device.is_cpu() ? std::max(2U, std::thread::hardware_concurrency()) : kModelsOnGpu);
}

std::unique_ptr<LoadedCode> PackedCode::load(c10::Device device, size_t num_models) const {
  const std::filesystem::path folder = unpack_code(files_, archive_.string());
  const auto& runners = torch::inductor::getAOTIModelRunnerRegistry();
  const auto make = runners.find(c10::DeviceTypeName(device.type(), /*lower_case=*/true));
  if (make == runners.end()) {
    throw CheckpointError(
        fmt::format("{}: this libtorch does not run compiled code on {}", archive_.string(), device.str()));
  }
  const c10::DeviceGuard guard(device);  // the runner leaves its own behind
  try {
    auto runner = make->second((folder / library_).string(), num_models, device.str(), folder.string(),
                               /*run_single_threaded=*/num_models == 1);
    return std::make_unique<LoadedCode>(std::move(runner), num_models);
  } catch (const std::exception&) {  // the runner throws types of its own
    throw CheckpointError(fmt::format("{}: its compiled code cannot be loaded: {}", archive_.string(),
                                      text_of(std::current_exception())));
  }
}

}  // namespace fulgur
