#include "fulgur/programs/program_archive.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/formats/write_archive.h"
#include "fulgur/checkpoint/formats/zip_directory.h"

namespace fulgur {
namespace {

using Json = nlohmann::json;
using program::Input;

constexpr std::string_view kModelsFolder = "models/", kJsonEnding = ".json";

// The entries of a zip file, all stored as they are, by their names below the folder that they are in.
std::map<std::string, std::string_view> read_entries(const MemoryMap& map, std::string_view file) {
  const std::string_view bytes(map.bytes().data(), map.bytes().size());
  const ReadBytes read = [&](uint64_t begin, uint64_t num_bytes) {
    return std::string(bytes.substr(begin, num_bytes));
  };
  std::map<std::string, std::string_view> entries;
  for (const ZipEntry& entry : read_zip_directory(read, bytes.size(), file)) {
    if (entry.method != 0 || entry.is_encrypted || entry.stored_bytes != entry.num_bytes) {
      throw CheckpointError(
          fmt::format("{}: its entry {} is compressed, which torch.export.save() never does", file, quote(entry.name)));
    }
    const size_t slash = entry.name.find('/');
    const std::string name = slash == entry.name.npos ? entry.name : entry.name.substr(slash + 1);
    const uint64_t begin = zip_entry_begin(entry, read, bytes.size(), file);
    if (!entries.emplace(name, bytes.substr(begin, entry.num_bytes)).second) {
      throw CheckpointError(fmt::format("{}: two of its entries are called {}", file, quote(name)));
    }
  }
  return entries;
}

// The names of the programs in the archive.
std::vector<std::string> program_names(const std::map<std::string, std::string_view>& entries) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : entries) {
    if (!name.starts_with(kModelsFolder) || !name.ends_with(kJsonEnding)) continue;
    names.push_back(name.substr(kModelsFolder.size(), name.size() - kModelsFolder.size() - kJsonEnding.size()));
  }
  return names;
}

int64_t whole_number(const Json& json) {
  const Json value = json.is_object() && json.size() == 1 ? json.value("as_int", Json()) : json;
  if (!value.is_number_integer()) throw BadJson(fmt::format("{} is no known size", quote(json.dump())));
  const auto number = value.get<int64_t>();
  if (number < 0) throw BadJson(fmt::format("{} is no size", number));
  return number;
}

std::vector<int64_t> whole_numbers(const Json& json) {
  std::vector<int64_t> numbers;
  for (const Json& item : json) numbers.push_back(whole_number(item));
  return numbers;
}

// How many elements of the storage a layout reaches, from its start on; null if that is beyond 64 bits.
std::optional<int64_t> reach(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last)) return {};
  }
  return last == std::numeric_limits<int64_t>::max() ? std::nullopt : std::optional(last + 1);
}

}  // namespace

ProgramArchive::ProgramArchive(const std::filesystem::path& file) : map_(MemoryMap::open(file)) {
  entries_ = read_entries(*map_, file.string());
  const std::vector<std::string> names = program_names(entries_);
  if (names.size() != 1) {
    fail(names.empty() ? "holds no program of torch.export.save(); torch 2.11 writes one as models/model.json"
                       : fmt::format("holds several programs ({}); one is read", fmt::join(names, ", ")));
  }
  model_ = names.front();
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
  const Json json = parse_json(bytes_of(name), map_->path().string(), {.max_depth = 16, .max_values = 20'000'000});
  Index index;
  try {
    for (const auto& [tensor, entry] : json.at("config").items()) {
      if (entry.at("use_pickle").get<bool>()) {
        throw BadJson(fmt::format("tensor {} is pickled, and nothing is unpickled: only plain strided tensors are read",
                                  quote(tensor)));
      }
      const Json& meta = entry.at("tensor_meta");
      Stored stored{.entry = folder + entry.at("path_name").get<std::string>(),
                    .dtype = program::to_dtype(meta.at("dtype").get<int64_t>()),
                    .sizes = whole_numbers(meta.at("sizes")),
                    .strides = whole_numbers(meta.at("strides")),
                    .storage_offset = whole_number(meta.at("storage_offset")),
                    .requires_grad = meta.at("requires_grad").get<bool>()};
      check_inside(tensor, stored);
      index.emplace(tensor, std::move(stored));
    }
  } catch (const BadJson& error) {
    fail(fmt::format("{}: {}", name, error.what()));
  } catch (const Json::exception& error) {
    fail(fmt::format("{}: {}", name, error.what()));
  }
  return index;
}

void ProgramArchive::check_inside(const std::string& name, const Stored& stored) const {
  if (stored.sizes.size() != stored.strides.size()) {
    throw BadJson(
        fmt::format("tensor {} has {} sizes and {} strides", quote(name), stored.sizes.size(), stored.strides.size()));
  }
  const auto num_elements = static_cast<int64_t>(bytes_of(stored.entry).size() / c10::elementSize(stored.dtype));
  const std::optional<int64_t> needed = reach(stored.sizes, stored.strides, stored.storage_offset);
  if (!needed || *needed > num_elements) {
    throw BadJson(fmt::format("tensor {} of sizes {} lies outside its entry {}, which has {} elements", quote(name),
                              stored.sizes, quote(stored.entry), num_elements));
  }
}

void ProgramArchive::check_all_there() const {
  std::map<std::string, const Stored*> owners;  // of the entries of parameters
  for (const Input& input : program_.inputs) {
    const bool is_constant =
        input.kind == Input::Kind::constant || (input.kind == Input::Kind::buffer && !input.is_persistent);
    const bool is_weight = input.kind == Input::Kind::parameter || (input.kind == Input::Kind::buffer && !is_constant);
    if (!is_constant && !is_weight) continue;
    const Index& index = is_weight ? weights_ : constants_;
    const auto found = index.find(input.name);
    if (found == index.end()) fail(fmt::format("has no tensor {}, which its graph uses", quote(input.name)));
    if (input.kind != Input::Kind::parameter) continue;
    const Stored& own = found->second;
    const Stored& owner = *owners.emplace(own.entry, &own).first->second;
    if (owner.sizes != own.sizes || owner.strides != own.strides || owner.storage_offset != own.storage_offset) {
      fail(fmt::format("parameter {} overlaps another one without being the same", quote(input.name)));
    }
  }
}

std::string_view ProgramArchive::bytes_of(const std::string& entry) const {
  const auto found = entries_.find(entry);
  if (found == entries_.end()) fail(fmt::format("has no entry {}, which torch 2.11 writes", quote(entry)));
  return found->second;
}

ProgramArchive::Tensor ProgramArchive::tensor(const Index& index, const std::string& name) const {
  const auto found = index.find(name);
  if (found == index.end()) fail(fmt::format("has no tensor {}", quote(name)));
  const Stored& stored = found->second;
  const std::string_view bytes = bytes_of(stored.entry);
  const auto num_elements = static_cast<int64_t>(bytes.size() / c10::elementSize(stored.dtype));
  const at::Tensor storage = map_->tensor(bytes.data() - map_->bytes().data(), {num_elements}, stored.dtype);
  at::Tensor tensor = at::empty({0}, storage.options());
  tensor.set_(storage.storage(), stored.storage_offset, stored.sizes, stored.strides);
  return {.tensor = std::move(tensor), .requires_grad = stored.requires_grad, .entry = stored.entry};
}

std::vector<std::string> ProgramArchive::weight_names() const {
  std::vector<std::string> names;
  for (const auto& [name, stored] : weights_) names.push_back(name);
  return names;
}

void ProgramArchive::write_with(const std::filesystem::path& file,
                                const std::map<std::string, at::Tensor>& weights) const {
  for (const auto& [name, tensor] : weights) {
    if (!weights_.contains(name)) fail(unknown_name_message("weight", name, weight_names()));
  }
  std::map<std::string, at::Tensor> storages;  // by entry
  for (const auto& [name, stored] : weights_) {
    const auto found = weights.find(name);
    if (found == weights.end()) fail(fmt::format("no values were given for {}", quote(name)));
    const at::Tensor& values = found->second;
    if (values.sizes() != stored.sizes || values.scalar_type() != stored.dtype) {
      fail(fmt::format("{} has {} of sizes {} in the archive, but the values are {} of sizes {}", quote(name),
                       toString(stored.dtype), stored.sizes, toString(values.scalar_type()), values.sizes()));
    }
    at::Tensor& storage = storages[stored.entry];
    const std::string_view bytes = bytes_of(stored.entry);
    if (!storage.defined()) {
      const auto num_elements = static_cast<int64_t>(bytes.size() / c10::elementSize(stored.dtype));
      storage = map_->tensor(bytes.data() - map_->bytes().data(), {num_elements}, stored.dtype).clone();
    }
    storage.as_strided(stored.sizes, stored.strides, stored.storage_offset).copy_(values.detach());
  }
  write_archive(file, [&](caffe2::serialize::PyTorchStreamWriter& archive) {
    constexpr uint64_t kVersion = 6;  // of the zip format, as torch.export.save() sets it
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
