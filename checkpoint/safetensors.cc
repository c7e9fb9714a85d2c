#include "checkpoint/safetensors.h"

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/file_system.h"
#include "core/error.h"

namespace fulgur {
namespace {

using Json = nlohmann::ordered_json;

std::string_view dtype_name(const std::filesystem::path& file, const std::string& name, at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return "BOOL";
    case at::kByte:
      return "U8";
    case at::kChar:
      return "I8";
    case at::kShort:
      return "I16";
    case at::kInt:
      return "I32";
    case at::kLong:
      return "I64";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kFloat:
      return "F32";
    case at::kDouble:
      return "F64";
    default:
      throw CheckpointError(fmt::format("{}: tensor '{}' has dtype {}, which safetensors has no name for",
                                        file.string(), name, c10::toString(dtype)));
  }
}

std::string make_header(const std::filesystem::path& file, const NamedTensors& tensors,
                        const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (name == "__metadata__" || header.contains(name)) {
      throw CheckpointError(fmt::format("{}: the tensor name '{}' is taken", file.string(), name));
    }
    const size_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", dtype_name(file, name, tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // so that the data is aligned
  return text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = make_header(path, tensors, metadata);
  const uint64_t header_size = header.size();
  static_assert(std::endian::native == std::endian::little, "the file is little-endian");
  FileWriter file(path);
  file.write(&header_size, sizeof(header_size));
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor data = tensor.detach().cpu().contiguous();
    file.write(data.const_data_ptr(), data.nbytes());
  }
  file.sync_and_close();
}

}  // namespace fulgur
