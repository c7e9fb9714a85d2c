#pragma once

#include <ATen/core/Tensor.h>
#include <arrow/type_fwd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fulgur/base/state.h"

namespace fulgur {

// The values that a column had in training: text or int64, sorted, each with its place as index. A missing value is a
// value like any other, and the last one.
class Vocabulary {
 public:
  // Throws std::runtime_error if the column has no value at all or its type cannot be a category.
  static Vocabulary learn(const std::string& name, const arrow::ChunkedArray& column);

  // Throws CheckpointError for a state that is not a vocabulary's.
  static Vocabulary from_state(const State& state);
  State state() const;

  int64_t size() const;
  bool has_text() const;  // otherwise int64
  std::string text(int64_t index) const;

  // int64 [rows]: the index of each row's value, and -1 for a value that is not in the vocabulary. Throws
  // std::runtime_error if the column's type does not fit the vocabulary.
  at::Tensor indices(const std::string& name, const arrow::ChunkedArray& column) const;

 private:
  explicit Vocabulary(std::shared_ptr<arrow::Array> values) : values_(std::move(values)) {}

  std::shared_ptr<arrow::Array> values_;
};

}  // namespace fulgur
