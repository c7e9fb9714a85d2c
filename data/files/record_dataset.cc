#include "fulgur/data/files/record_dataset.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/data/files/content_digest.h"

namespace fulgur {
namespace {

int64_t bytes_of(const RecordField& field) {
  int64_t product = static_cast<int64_t>(c10::elementSize(field.dtype));
  for (const int64_t size : field.shape) {
    if (size < 1 || __builtin_mul_overflow(product, size, &product)) {
      throw UsageError(fmt::format("RecordDataset: field '{}' cannot have the shape ({})", field.name,
                                   fmt::join(field.shape, ", ")));
    }
  }
  return product;
}

// Returns the bytes of a record.
int64_t check(const std::vector<std::filesystem::path>& files, const std::vector<RecordField>& fields) {
  if (files.empty()) throw UsageError("RecordDataset: no file is given");
  if (fields.empty()) throw UsageError("RecordDataset: no field is given");
  int64_t sum = 0;
  std::set<std::string> names;
  for (const RecordField& field : fields) {
    if (field.name.empty()) throw UsageError("RecordDataset: a field has no name");
    if (!names.insert(field.name).second) {
      throw UsageError(fmt::format("RecordDataset: there are two fields '{}'", field.name));
    }
    if (__builtin_add_overflow(sum, bytes_of(field), &sum)) throw UsageError("RecordDataset: a record is too large");
  }
  return sum;
}

}  // namespace

RecordDataset::RecordDataset(const std::vector<std::filesystem::path>& files, std::vector<RecordField> fields)
    : fields_(std::move(fields)), record_bytes_(check(files, fields_)) {
  std::string content;
  for (const auto& file : files) {
    maps_.push_back(MemoryMap::open(file));
    const auto num_bytes = std::ssize(maps_.back()->bytes());
    if (num_bytes == 0 || num_bytes % record_bytes_ != 0) {
      throw std::runtime_error(
          fmt::format("{}: {} bytes are not a whole number of records of {} bytes; the file is cut "
                      "off, or the fields are other ones",
                      file.string(), num_bytes, record_bytes_));
    }
    ends_.push_back((ends_.empty() ? 0 : ends_.back()) + num_bytes / record_bytes_);
    content += describe_content(file, maps_.back()->bytes());
  }
  for (const RecordField& field : fields_) {
    content += fmt::format("{} {} {}\n", field.name, c10::toString(field.dtype), fmt::join(field.shape, ","));
  }
  digest_ = hex_digest(content);
}

std::shared_ptr<RecordDataset> RecordDataset::make(const std::vector<std::filesystem::path>& files,
                                                   std::vector<RecordField> fields) {
  return std::make_shared<RecordDataset>(files, std::move(fields));
}

const char* RecordDataset::record(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < size(), "sample ", index, " of ", size());
  const auto file = static_cast<size_t>(std::ranges::upper_bound(ends_, index) - ends_.begin());
  const int64_t before = file == 0 ? 0 : ends_[file - 1];
  return maps_[file]->bytes().data() + (index - before) * record_bytes_;
}

Batch RecordDataset::get(int64_t index, Random&) const {
  std::vector<Batch::Entry> sample;
  for (const auto& [name, tensor] : get_batch(at::scalar_tensor(index, at::kLong).unsqueeze(0), {})) {
    sample.emplace_back(name, tensor[0]);
  }
  return Batch(std::move(sample));
}

Batch RecordDataset::get_batch(const at::Tensor& indices, std::span<Random>) const {
  std::vector<Batch::Entry> batch;
  std::vector<std::pair<char*, size_t>> outputs;  // where the next sample goes, and its bytes, for each field
  for (const RecordField& field : fields_) {
    std::vector<int64_t> shape{indices.numel()};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    const at::Tensor& tensor = batch.emplace_back(field.name, at::empty(shape, field.dtype)).second;
    outputs.emplace_back(static_cast<char*>(tensor.mutable_data_ptr()), static_cast<size_t>(bytes_of(field)));
  }
  const at::Tensor contiguous = indices.contiguous();
  const int64_t* const index = contiguous.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < contiguous.numel(); ++i) {
    const char* from = record(index[i]);
    for (auto& [to, num_bytes] : outputs) {
      std::memcpy(to, from, num_bytes);
      to += num_bytes;
      from += num_bytes;
    }
  }
  return Batch(std::move(batch));
}

}  // namespace fulgur
