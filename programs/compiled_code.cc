#include "fulgur/programs/compiled_code.h"

#include <fmt/format.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <unordered_map>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"

namespace fulgur {
namespace {

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

std::unordered_map<std::string, std::string> metadata_of(const std::filesystem::path& file, const std::string& model) {
  try {
    return torch::inductor::AOTIModelPackageLoader::load_metadata_from_package(file.string(), model);
  } catch (const std::exception&) {  // the loader throws types of its own
    throw CheckpointError(fmt::format("{}: cannot be loaded: {}", file.string(), text_of(std::current_exception())));
  }
}

}  // namespace

std::string why_code_does_not_run(const std::filesystem::path& file, const std::string& model, c10::Device device) {
  std::unordered_map<std::string, std::string> metadata = metadata_of(file, model);
  const std::string needed_device = metadata["AOTI_DEVICE_KEY"];
  if (needed_device != c10::DeviceTypeName(device.type(), /*lower_case=*/true)) {
    return fmt::format("was compiled for {}, but is to run on {}", needed_device, device.str());
  }
  if (const std::string& other = metadata["AOTI_MACHINE"]; !other.empty() && other != machine()) {
    return fmt::format("was compiled for {}, but this machine is {}: compile it here", other, machine());
  }
  const std::string instructions = metadata["AOTI_CPU_ISA"];
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

}  // namespace fulgur
