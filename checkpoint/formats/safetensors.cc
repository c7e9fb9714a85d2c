#include "fulgur/checkpoint/formats/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <set>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/limits.h"

namespace fulgur {
namespace {

using Json = nlohmann::json;

constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {{"BOOL", at::kBool},
                                                                   {"U8", at::kByte},
                                                                   {"I8", at::kChar},
                                                                   {"I16", at::kShort},
                                                                   {"I32", at::kInt},
                                                                   {"I64", at::kLong},
                                                                   {"F16", at::kHalf},
                                                                   {"BF16", at::kBFloat16},
                                                                   {"F32", at::kFloat},
                                                                   {"F64", at::kDouble},
                                                                   {"C64", at::kComplexFloat},
                                                                   {"U16", at::kUInt16},
                                                                   {"U32", at::kUInt32},
                                                                   {"U64", at::kUInt64},
                                                                   {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                   {"F8_E5M2", at::kFloat8_e5m2},
                                                                   {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                                                                   {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                                                                   {"F8_E8M0", at::kFloat8_e8m0fnu}};

// Null if the format has no name for the dtype.
const std::string_view* name_of(at::ScalarType dtype) {
  const auto* known =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& d) { return d.second == dtype; });
  return known == std::end(kDtypes) ? nullptr : &known->first;
}

const at::ScalarType* dtype_of(std::string_view name) {
  const auto* known =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& d) { return d.first == name; });
  return known == std::end(kDtypes) ? nullptr : &known->second;
}

// With this order every tensor starts at a multiple of its element size.
NamedTensors largest_elements_first(NamedTensors tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.second.element_size() > b.second.element_size(); });
  return tensors;
}

std::string to_json(const std::string& name, const at::Tensor& tensor, size_t offset) {
  const std::string_view* dtype = name_of(tensor.scalar_type());
  if (dtype == nullptr) {
    throw BadJson(fmt::format("tensor '{}' has dtype {}, which safetensors has no name for", name,
                              c10::toString(tensor.scalar_type())));
  }
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", Json(name).dump(), *dtype,
                     fmt::join(tensor.sizes(), ","), offset, offset + tensor.nbytes());
}

std::string make_header(const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + Json(metadata).dump();
  std::set<std::string_view> names{"__metadata__"};
  size_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) throw BadJson(fmt::format("the tensor name '{}' is taken", name));
    text += (text.size() == 1 ? "" : ",") + to_json(name, tensor, offset);
    offset += tensor.nbytes();
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');  // pads, so that the data is aligned
  if (text.size() > limits::kSafetensorsHeaderBytes) {
    throw BadJson(fmt::format("the names and the metadata make a header of {} bytes; a safetensors file can have {}",
                              text.size(), limits::kSafetensorsHeaderBytes));
  }
  return text;
}

std::string make_header_for(const std::filesystem::path& file, const NamedTensors& tensors,
                            const std::map<std::string, std::string>& metadata) {
  try {
    return make_header(tensors, metadata);
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file.string(), error.what()));
  } catch (const Json::type_error& error) {
    throw CheckpointError(fmt::format("{}: a name or the metadata is not UTF-8: {}", file.string(), error.what()));
  }
}

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) {
  if (const std::string_view* name = name_of(dtype)) return *name;
  throw CheckpointError(fmt::format("safetensors has no name for dtype {}", c10::toString(dtype)));
}

FileDigest write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                             const std::map<std::string, std::string>& metadata) {
  TemporaryFile file(path);
  write_safetensors(file.writer(), tensors, metadata);
  return file.commit();
}

void write_safetensors(FileWriter& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const NamedTensors sorted = largest_elements_first(tensors);
  const std::string header = make_header_for(file.path(), sorted, metadata);
  const uint64_t header_size = header.size();
  static_assert(std::endian::native == std::endian::little, "the file is little-endian");
  file.write(&header_size, sizeof(header_size));
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : sorted) {
    const at::Tensor data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
    file.write(data.const_data_ptr(), data.nbytes());
  }
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path)
    : path_(std::move(path)),
      map_(MemoryMap::open(path_)),
      header_(parse_safetensors_header(map_->bytes(), static_cast<int64_t>(map_->bytes().size()), path_.string())) {
  for (size_t i = 0; i < header_.entries.size(); ++i) index_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto entry = index_.find(name);
  return entry == index_.end() ? nullptr : &header_.entries[entry->second];
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const {
  const SafetensorsEntry& found = entry(name);
  return map_->tensor(header_.data_begin + found.begin, found.shape, *dtype_of(found.dtype));
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const SafetensorsEntry* found = find(name);
  if (found == nullptr) fail(name, "is not there");
  if (dtype_of(found->dtype) == nullptr) fail(name, fmt::format("has dtype {}, which is not supported", found->dtype));
  return *found;
}

void SafetensorsFile::fail(std::string_view name, std::string_view reason) const {
  throw CheckpointError(fmt::format("{}: tensor '{}' {}", path_.string(), name, reason));
}

}  // namespace fulgur
