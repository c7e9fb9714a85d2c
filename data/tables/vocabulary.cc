#include "fulgur/data/tables/vocabulary.h"

#include <ATen/ops/empty.h>
#include <arrow/array/array_binary.h>
#include <arrow/array/array_primitive.h>
#include <arrow/array/builder_binary.h>
#include <arrow/array/builder_primitive.h>
#include <arrow/array/concatenate.h>
#include <arrow/array/util.h>
#include <arrow/chunked_array.h>
#include <arrow/compute/api_scalar.h>
#include <arrow/compute/api_vector.h>
#include <arrow/compute/cast.h>
#include <arrow/datum.h>
#include <arrow/type.h>
#include <fmt/format.h>

#include <cstring>
#include <stdexcept>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/data/tables/arrow_result.h"
#include "fulgur/data/tables/column.h"

namespace fulgur {
namespace {

std::string learning(const std::string& name) { return fmt::format("cannot list the values of the column '{}'", name); }

std::shared_ptr<arrow::Array> text_of(const at::Tensor& bytes, const at::Tensor& lengths) {
  arrow::LargeStringBuilder builder;
  const char* begin = static_cast<const char*>(bytes.const_data_ptr());
  int64_t left = bytes.numel();
  for (int64_t i = 0; i < lengths.numel(); ++i) {
    const int64_t length = lengths.const_data_ptr<int64_t>()[i];
    if (length < 0 || length > left) throw CheckpointError("the lengths of a vocabulary's values do not fit its text");
    check_status(builder.Append(std::string_view(begin, static_cast<size_t>(length))), "vocabulary");
    begin += length;
    left -= length;
  }
  return value_of(builder.Finish(), "vocabulary");
}

std::shared_ptr<arrow::Array> with_missing(const std::shared_ptr<arrow::Array>& values) {
  const auto missing = value_of(arrow::MakeArrayOfNull(values->type(), 1), "vocabulary");
  return value_of(arrow::Concatenate({values, missing}), "vocabulary");
}

const at::Tensor& list_of_type(const State& state, const char* name, at::ScalarType type) {
  const auto& tensor = state.get<at::Tensor>(name);
  if (tensor.dim() == 1 && tensor.scalar_type() == type && tensor.is_contiguous() && tensor.is_cpu()) return tensor;
  throw CheckpointError(fmt::format("the vocabulary's '{}' is not a list of {}", name, c10::toString(type)));
}

}  // namespace

Vocabulary Vocabulary::learn(const std::string& name, const arrow::ChunkedArray& column) {
  if (column.null_count() == column.length()) {
    throw std::runtime_error(fmt::format("the column '{}' has no values in training; leave it out", name));
  }
  const auto keys = keys_of(name, column, arrow::large_utf8());
  const auto distinct = value_of(arrow::compute::Unique(keys), learning(name));
  const auto order = value_of(arrow::compute::SortIndices(*distinct), learning(name));
  return Vocabulary(value_of(arrow::compute::Take(*distinct, *order), learning(name)));
}

Vocabulary Vocabulary::from_state(const State& state) {
  std::shared_ptr<arrow::Array> values;
  if (state.find<at::Tensor>("text") != nullptr) {
    values = text_of(list_of_type(state, "text", at::kByte), list_of_type(state, "lengths", at::kLong));
  } else {
    const at::Tensor& numbers = list_of_type(state, "numbers", at::kLong);
    arrow::Int64Builder builder;
    check_status(builder.AppendValues(numbers.const_data_ptr<int64_t>(), numbers.numel()), "vocabulary");
    values = value_of(builder.Finish(), "vocabulary");
  }
  return Vocabulary(state.get<bool>("has_missing") ? with_missing(values) : values);
}

State Vocabulary::state() const {
  State state;
  const bool has_missing = values_->null_count() > 0;  // the last one
  const int64_t count = values_->length() - (has_missing ? 1 : 0);
  state.set("has_missing", has_missing);
  at::Tensor numbers = at::empty({count}, at::kLong);
  auto* number = numbers.mutable_data_ptr<int64_t>();
  if (!has_text()) {
    const auto& values = static_cast<const arrow::Int64Array&>(*values_);
    for (int64_t i = 0; i < count; ++i) number[i] = values.Value(i);
    state.set("numbers", numbers);
    return state;
  }
  const auto& values = static_cast<const arrow::LargeStringArray&>(*values_);
  std::string text;
  for (int64_t i = 0; i < count; ++i) {
    number[i] = values.value_length(i);
    text += values.GetView(i);
  }
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  state.set("text", bytes);
  state.set("lengths", numbers);
  return state;
}

int64_t Vocabulary::size() const { return values_->length(); }

bool Vocabulary::has_text() const { return values_->type_id() == arrow::Type::LARGE_STRING; }

std::string Vocabulary::text(int64_t index) const {
  if (values_->IsNull(index)) return "missing";
  if (has_text()) return static_cast<const arrow::LargeStringArray&>(*values_).GetString(index);
  return std::to_string(static_cast<const arrow::Int64Array&>(*values_).Value(index));
}

at::Tensor Vocabulary::indices(const std::string& name, const arrow::ChunkedArray& column) const {
  auto keys = keys_of(name, column, values_->type());
  if (has_text() && keys->type()->id() == arrow::Type::INT64) {
    // A file whose values all look like numbers was read without read_table's text_columns. Their text is not always
    // the one in the file: 1 may have been 01.
    keys = value_of(arrow::compute::Cast(keys, arrow::large_utf8()), learning(name)).chunked_array();
  }
  if (!keys->type()->Equals(*values_->type())) {
    throw std::runtime_error(
        fmt::format("the column '{}' has text, but it had numbers in training; convert one of the two", name));
  }
  const arrow::compute::SetLookupOptions options(values_, arrow::compute::SetLookupOptions::MATCH);
  const auto places = value_of(arrow::compute::IndexIn(keys, options), learning(name)).chunked_array();
  at::Tensor indices = at::empty({column.length()}, at::kLong);
  auto* index = indices.mutable_data_ptr<int64_t>();
  for (const auto& chunk : places->chunks()) {
    for (const std::optional<int32_t>& place : static_cast<const arrow::Int32Array&>(*chunk))
      *index++ = place.value_or(-1);
  }
  return indices;
}

}  // namespace fulgur
