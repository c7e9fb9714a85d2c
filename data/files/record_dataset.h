#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/dataset.h"

namespace fulgur {

// One part of a record: its elements lie one after another, the last dimension contiguous, little-endian.
struct RecordField {
  std::string name{};
  at::ScalarType dtype = at::kByte;
  std::vector<int64_t> shape{};  // empty: a single number
};

// Files of nothing but records of equal size, whose fields follow each other without gaps, such as CIFAR-10's:
//   auto train = RecordDataset::make({"data_batch_1.bin", ..., "data_batch_5.bin"},
//                                    {{.name = "label"}, {.name = "image", .shape = {3, 32, 32}}});
// The files are mapped; a batch copies each field of its samples once.
class RecordDataset final : public Dataset {
 public:
  // Throws UsageError if there is no file or no field, a name is empty or there twice, or a size is below 1;
  // std::runtime_error, naming the file, if it cannot be opened or does not have a whole number of records.
  RecordDataset(const std::vector<std::filesystem::path>& files, std::vector<RecordField> fields);
  static std::shared_ptr<RecordDataset> make(const std::vector<std::filesystem::path>& files,
                                             std::vector<RecordField> fields);

  int64_t size() const override { return ends_.back(); }
  Batch get(int64_t index, Random& random) const override;
  Batch get_batch(const at::Tensor& indices, std::span<Random> random) const override;
  std::string digest() const override { return digest_; }

  int64_t record_bytes() const { return record_bytes_; }

 private:
  const char* record(int64_t index) const;

  std::vector<RecordField> fields_;
  int64_t record_bytes_;
  std::vector<std::shared_ptr<const MemoryMap>> maps_{};
  std::vector<int64_t> ends_{};  // number of records in this file and all before it
  std::string digest_;
};

}  // namespace fulgur
