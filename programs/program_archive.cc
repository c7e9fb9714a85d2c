#include "fulgur/programs/program_archive.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/formats/write_archive.h"
#include "fulgur/programs/archive_entries.h"

namespace fulgur {
namespace {

using Json = nlohmann::json;
using program::Input;

int64_t whole_number(const Json& json) {
  const Json value = json.is_object() && json.size() == 1 ? json.value("as_int", Json()) : json;
  const bool is_size =
      value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()};
  if (!is_size) throw BadJson(fmt::format("{} is no size, stride or offset", quote(json.dump())));
  return value.get<int64_t>();
}

std::vector<int64_t> whole_numbers(const Json& json) {
  if (!json.is_array()) throw BadJson(fmt::format("{} is no list of sizes", quote(json.dump())));
  std::vector<int64_t> numbers;
  for (const Json& item : json) numbers.push_back(whole_number(item));
  return numbers;
}

// How many elements of the storage a layout reaches, from its start on; null if they, or the bytes of a contiguous
// copy, are beyond 64 bits.
std::optional<int64_t> reach(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  constexpr int64_t kMaxElementBytes = 16;
  int64_t last = offset, num_bytes = kMaxElementBytes;
  bool is_empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    is_empty |= sizes[i] == 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(num_bytes, std::max<int64_t>(sizes[i], 1), &num_bytes) ||
        __builtin_mul_overflow(std::max<int64_t>(sizes[i], 1) - 1, strides[i], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return {};
    }
  }
  if (is_empty) return offset;
  return last == std::numeric_limits<int64_t>::max() ? std::nullopt : std::optional(last + 1);
}

}  // namespace

ProgramArchive::ProgramArchive(const std::filesystem::path& file) : map_(MemoryMap::open(file)) {
  try {
    entries_ = read_archive_entries(*map_);
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("{}; an archive of torch.export.save() is needed", error.what()));
  }
  const std::set<std::string> names = exported_programs(entries_);
  if (names.size() != 1) {
    fail(!names.empty() ? fmt::format("holds several programs ({}); one is read", fmt::join(names, ", "))
         : !compiled_models(entries_).empty()
             ? "is a package of AOTInductor, which has no backward: a Predictor runs it, and what torch.export.save() "
               "has written can be trained"
             : "holds no program of torch.export.save(); torch 2.11 writes one as models/model.json");
  }
  model_ = *names.begin();
  if (const auto order = entries_.find("byteorder"); order != entries_.end() && order->second != "little") {
    fail("was written on a machine with another byte order");
  }
  program_ = program::parse_program(bytes_of(fmt::format("models/{}.json", model_)), file.string());
  weights_ = read_index("data/weights/", "weights");
  constants_ = read_index("data/constants/", "constants");
  check_all_there();
}

ProgramArchive::Index ProgramArchive::read_index(const std::string& folder, const std::string& kind) const {
  const std::string name = fmt::format("{}{}_{}_config.json", folder, model_, kind);
  const Json json = parse_json(bytes_of(name), fmt::format("{}: {}", map_->path().string(), name),
                               {.max_depth = 16, .max_values = 20'000'000});
  Index index;
  std::map<std::string, at::ScalarType> dtypes;  // by entry
  try {
    for (const auto& [tensor, meta] : json.at("config").items()) {
      const Stored stored = read_stored(folder, tensor, meta);
      if (dtypes.emplace(stored.entry, stored.dtype).first->second != stored.dtype) {
        throw BadJson(fmt::format("tensor {} has another data type than others of its entry {}", quote(tensor),
                                  quote(stored.entry)));
      }
      index.emplace(tensor, stored);
    }
  } catch (const BadJson& error) {
    fail(fmt::format("{}: {}", name, error.what()));
  } catch (const Json::exception& error) {
    fail(fmt::format("{}: {}", name, error.what()));
  }
  return index;
}

ProgramArchive::Stored ProgramArchive::read_stored(const std::string& folder, const std::string& name,
                                                   const Json& json) const {
  try {
    if (json.at("use_pickle").get<bool>()) {
      throw BadJson("it is pickled, and nothing is unpickled: only plain strided tensors are read");
    }
    const Json& meta = json.at("tensor_meta");
    Stored stored{.entry = folder + json.at("path_name").get<std::string>(),
                  .dtype = program::to_dtype(meta.at("dtype").get<int64_t>()),
                  .sizes = whole_numbers(meta.at("sizes")),
                  .strides = whole_numbers(meta.at("strides")),
                  .storage_offset = whole_number(meta.at("storage_offset")),
                  .requires_grad = meta.at("requires_grad").get<bool>()};
    check_inside(stored);
    return stored;
  } catch (const BadJson& error) {
    throw BadJson(fmt::format("tensor {}: {}", quote(name), error.what()));
  } catch (const Json::exception& error) {
    throw BadJson(fmt::format("tensor {}: {}", quote(name), error.what()));
  }
}

void ProgramArchive::check_inside(const Stored& stored) const {
  constexpr size_t kMaxDimensions = 64;  // most that libtorch's operators take
  if (stored.sizes.size() != stored.strides.size() || stored.sizes.size() > kMaxDimensions) {
    throw BadJson(fmt::format("it has {} sizes and {} strides", stored.sizes.size(), stored.strides.size()));
  }
  const size_t num_bytes = bytes_of(stored.entry).size(), element_bytes = c10::elementSize(stored.dtype);
  if (num_bytes % element_bytes != 0) {
    throw BadJson(fmt::format("its entry {} has {} bytes, no multiple of the {} of an element", quote(stored.entry),
                              num_bytes, element_bytes));
  }
  const std::optional<int64_t> needed = reach(stored.sizes, stored.strides, stored.storage_offset);
  if (!needed || *needed > static_cast<int64_t>(num_bytes / element_bytes)) {
    throw BadJson(fmt::format("it lies outside its entry {} of {} elements, with sizes {}, strides {} and offset {}",
                              quote(stored.entry), num_bytes / element_bytes, stored.sizes, stored.strides,
                              stored.storage_offset));
  }
}

void ProgramArchive::check_all_there() const {
  std::map<std::string, std::pair<std::string, const Stored*>> owners;  // the first parameter in each entry
  for (const Input& input : program_.inputs) {
    if (!input.is_constant() && !input.is_weight()) continue;
    const Index& index = input.is_constant() ? constants_ : weights_;
    const auto found = index.find(input.name);
    if (found == index.end()) fail(fmt::format("has no tensor {}, which its graph uses", quote(input.name)));
    if (input.kind != Input::Kind::parameter) continue;
    const Stored& own = found->second;
    const auto& [owner, same] = owners.emplace(own.entry, std::pair(input.name, &own)).first->second;
    if (same->sizes != own.sizes || same->strides != own.strides || same->storage_offset != own.storage_offset ||
        same->requires_grad != own.requires_grad) {
      fail(fmt::format("parameters {} and {} share memory without being the same; clone one of them before the export",
                       quote(owner), quote(input.name)));
    }
  }
}

std::string_view ProgramArchive::bytes_of(const std::string& entry) const {
  const auto found = entries_.find(entry);
  if (found == entries_.end()) fail(fmt::format("has no entry {}, which torch 2.11 writes", quote(entry)));
  return found->second;
}

// All elements of the entry that a tensor is in.
at::Tensor ProgramArchive::storage_of(const Stored& stored) const {
  const std::string_view bytes = bytes_of(stored.entry);
  const auto num_elements = static_cast<int64_t>(bytes.size() / c10::elementSize(stored.dtype));
  return map_->tensor(bytes.data() - map_->bytes().data(), {num_elements}, stored.dtype);
}

ProgramArchive::Tensor ProgramArchive::tensor(const Index& index, const std::string& name) const {
  const auto found = index.find(name);
  if (found == index.end()) fail(fmt::format("has no tensor {}", quote(name)));
  const Stored& stored = found->second;
  const at::Tensor storage = storage_of(stored);
  at::Tensor tensor = at::empty({0}, storage.options());
  tensor.set_(storage.storage(), stored.storage_offset, stored.sizes, stored.strides);
  return {.tensor = std::move(tensor), .requires_grad = stored.requires_grad, .entry = stored.entry};
}

std::vector<std::string> ProgramArchive::weight_names() const {
  std::vector<std::string> names;
  for (const Input& input : program_.inputs) {
    if (input.is_weight()) names.push_back(input.name);
  }
  return names;
}

void ProgramArchive::write_with(const std::filesystem::path& file,
                                const std::map<std::string, at::Tensor>& weights) const {
  std::map<std::string, at::Tensor> storages;  // by entry
  for (const auto& [name, values] : weights) {
    const auto found = weights_.find(name);
    if (found == weights_.end()) fail(unknown_name_message("weight", name, weight_names()));
    const Stored& stored = found->second;
    if (values.sizes() != stored.sizes || values.scalar_type() != stored.dtype) {
      fail(fmt::format("{} has {} of sizes {} in the archive, but the values are {} of sizes {}", quote(name),
                       toString(stored.dtype), stored.sizes, toString(values.scalar_type()), values.sizes()));
    }
    at::Tensor& storage = storages[stored.entry];
    if (!storage.defined()) storage = storage_of(stored).clone();
    try {
      storage.as_strided(stored.sizes, stored.strides, stored.storage_offset).copy_(values.detach());
    } catch (const c10::Error& error) {
      fail(fmt::format("{} cannot be written: {}", quote(name), error.what_without_backtrace()));
    }
  }
  for (const std::string& name : weight_names()) {
    if (!storages.contains(weights_.at(name).entry)) fail(fmt::format("no values were given for {}", quote(name)));
  }
  write_archive(file, [&](caffe2::serialize::PyTorchStreamWriter& archive) {
    constexpr uint64_t kVersion = 6;  // the version of the zip format that torch.export.save() sets
    archive.setMinVersion(kVersion);
    for (const auto& [name, bytes] : entries_) {
      if (name.starts_with(".data/")) continue;  // the writer's own
      const auto values = storages.find(name);
      const void* data = values == storages.end() ? bytes.data() : values->second.const_data_ptr();
      archive.writeRecord(name, data, bytes.size());
    }
  });
}

void ProgramArchive::fail(std::string_view reason) const {
  throw CheckpointError(fmt::format("{}: {}", map_->path().string(), reason));
}

}  // namespace fulgur
