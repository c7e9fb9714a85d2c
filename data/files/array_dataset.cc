#include "fulgur/data/files/array_dataset.h"

#include <fmt/format.h>

#include <map>
#include <stdexcept>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/files/content_digest.h"
#include "fulgur/data/files/npy.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

NamedTensors read_safetensors(const fs::path& path) {
  const SafetensorsFile file(path);
  NamedTensors tensors;
  for (const SafetensorsEntry& entry : file.entries()) tensors.emplace_back(entry.name, file.tensor(entry.name));
  return tensors;
}

// Collects the arrays of several files, which must fit together.
class Arrays {
 public:
  void add(const fs::path& file, const std::string& name, const at::Tensor& array) {
    if (array.dim() == 0) {
      throw std::runtime_error(fmt::format("{}: array '{}' is a single number, but dim 0 of each array counts samples",
                                           file.string(), name));
    }
    if (const auto [first, is_new] = files_.emplace(name, file); !is_new) {
      throw std::runtime_error(
          fmt::format("{}: array '{}' is also in {}; rename one", file.string(), name, first->second.string()));
    }
    if (!entries_.empty() && array.size(0) != entries_.front().second.size(0)) {
      const auto& [other, samples] = entries_.front();
      throw std::runtime_error(fmt::format("{}: array '{}' has {} samples (dim 0), but array '{}' of {} has {}",
                                           file.string(), name, array.size(0), other, files_.at(other).string(),
                                           samples.size(0)));
    }
    entries_.emplace_back(name, array);
  }

  Batch batch() && { return Batch(std::move(entries_)); }

 private:
  std::vector<Batch::Entry> entries_;
  std::map<std::string, fs::path> files_;  // by name of the array
};

// The dtype of equal width that index_select can take: on tensors of one dimension it has no unsigned one but bytes.
at::ScalarType selectable(at::ScalarType dtype) {
  switch (dtype) {
    case at::kUInt16:
      return at::kShort;
    case at::kUInt32:
      return at::kInt;
    case at::kUInt64:
      return at::kLong;
    default:
      return dtype;
  }
}

}  // namespace

NamedTensors read_arrays(const fs::path& file) {
  const std::string extension = file.extension().string();
  if (extension == ".npy") return {{file.stem().string(), read_npy(file)}};
  if (extension == ".npz") return read_npz(file);
  if (extension == ".safetensors") return read_safetensors(file);
  throw UsageError(
      fmt::format("'{}' is no file of arrays by its name; .npy, .npz and .safetensors can be read", file.string()));
}

ArrayDataset::ArrayDataset(const std::vector<fs::path>& files) {
  if (files.empty()) throw UsageError("ArrayDataset: no file is given");
  Arrays arrays;
  std::string content;
  for (const fs::path& file : files) {
    const NamedTensors tensors = read_arrays(file);
    if (tensors.empty()) throw std::runtime_error(fmt::format("{}: it has no array", file.string()));
    for (const auto& [name, array] : tensors) arrays.add(file, name, array);
    content += describe_content(file, MemoryMap::open(file)->bytes());
  }
  samples_ = TensorDataset::make(std::move(arrays).batch());
  digest_ = hex_digest(content);
}

Batch ArrayDataset::get_batch(const at::Tensor& indices, std::span<Random>) const {
  std::vector<Batch::Entry> batch;
  for (const auto& [name, array] : samples()) {
    const at::ScalarType dtype = array.scalar_type();
    batch.emplace_back(name, array.view(selectable(dtype)).index_select(0, indices).view(dtype));
  }
  return Batch(std::move(batch));
}

std::shared_ptr<ArrayDataset> ArrayDataset::make(const std::vector<fs::path>& files) {
  return std::make_shared<ArrayDataset>(files);
}

}  // namespace fulgur
