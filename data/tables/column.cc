#include "fulgur/data/tables/column.h"

#include <arrow/array/array_primitive.h>
#include <arrow/array/builder_primitive.h>
#include <arrow/chunked_array.h>
#include <arrow/compute/cast.h>
#include <arrow/compute/initialize.h>
#include <arrow/datum.h>
#include <arrow/table.h>
#include <arrow/type.h>
#include <arrow/type_traits.h>
#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/data/tables/arrow_result.h"

namespace fulgur {
namespace {

using Column = std::shared_ptr<arrow::ChunkedArray>;

std::string reading(const std::string& name) { return fmt::format("cannot read the column '{}'", name); }

Column cast(const std::string& name, const arrow::ChunkedArray& column, const std::shared_ptr<arrow::DataType>& type,
            const arrow::compute::CastOptions& options) {
  load_compute_functions();
  const arrow::Datum values(std::make_shared<arrow::ChunkedArray>(column.chunks(), column.type()));
  return value_of(arrow::compute::Cast(values, type, options), reading(name)).chunked_array();
}

Column decoded(const std::string& name, const arrow::ChunkedArray& column) {
  const auto safe = arrow::compute::CastOptions::Safe();
  if (column.type()->id() != arrow::Type::DICTIONARY) return cast(name, column, column.type(), safe);
  return cast(name, column, static_cast<const arrow::DictionaryType&>(*column.type()).value_type(), safe);
}

// The unit of the integers that a point in time is stored as: num_s / divisor seconds, one of which is 1.
struct TimeUnit {
  int64_t num_s, divisor;
};

TimeUnit unit_of(const arrow::DataType& type) {
  if (type.id() == arrow::Type::DATE32) return {86'400, 1};
  if (type.id() == arrow::Type::DATE64) return {1, 1'000};
  switch (static_cast<const arrow::TimestampType&>(type).unit()) {
    case arrow::TimeUnit::SECOND:
      return {1, 1};
    case arrow::TimeUnit::MILLI:
      return {1, 1'000};
    case arrow::TimeUnit::MICRO:
      return {1, 1'000'000};
    case arrow::TimeUnit::NANO:
      return {1, 1'000'000'000};
  }
  return {1, 1};
}

int64_t floor_divide(int64_t value, int64_t divisor) { return value / divisor - (value % divisor < 0 ? 1 : 0); }

// Points in time as the integers that they are stored as.
Column time_integers(const std::string& name, const arrow::ChunkedArray& times) {
  const auto safe = arrow::compute::CastOptions::Safe();
  if (times.type()->id() != arrow::Type::DATE32) return cast(name, times, arrow::int64(), safe);
  return cast(name, *cast(name, times, arrow::int32(), safe), arrow::int64(), safe);
}

Column stored_numbers(const std::string& name, const arrow::ChunkedArray& column) {
  const Column values = decoded(name, column);
  const Column numbers = is_time(*values->type()) ? time_integers(name, *values) : values;
  return cast(name, *numbers, arrow::float64(), arrow::compute::CastOptions::Unsafe());
}

bool is_boolean(const arrow::DataType& type) { return type.id() == arrow::Type::BOOL; }

}  // namespace

Column find_column(const arrow::Table& table, const std::string& name) {
  if (auto column = table.GetColumnByName(name)) return column;
  throw UsageError(unknown_name_message("column", name, table.ColumnNames()));
}

bool is_number(const arrow::DataType& type) {
  return arrow::is_integer(type.id()) || arrow::is_floating(type.id()) || arrow::is_decimal(type.id());
}

bool is_time(const arrow::DataType& type) { return type.id() == arrow::Type::TIMESTAMP || arrow::is_date(type.id()); }

bool is_text(const arrow::DataType& type) {
  return arrow::is_string(type.id()) || type.id() == arrow::Type::STRING_VIEW;
}

const arrow::DataType& value_type(const arrow::ChunkedArray& column) {
  const arrow::DataType& type = *column.type();
  return type.id() == arrow::Type::DICTIONARY ? *static_cast<const arrow::DictionaryType&>(type).value_type() : type;
}

std::shared_ptr<arrow::DoubleArray> numbers_of(const std::string& name, const arrow::ChunkedArray& column) {
  const arrow::DataType& type = value_type(column);
  if (!is_number(type) && !is_boolean(type) && !is_time(type) && type.id() != arrow::Type::NA) {
    throw std::runtime_error(fmt::format("the column '{}' has the type {}, which is no number; {}", name,
                                         type.ToString(),
                                         is_text(type) ? "name it in categories, or leave it out" : "leave it out"));
  }
  const Column values = stored_numbers(name, column);
  const TimeUnit unit = is_time(type) ? unit_of(type) : TimeUnit{1, 1};
  arrow::DoubleBuilder builder;
  check_status(builder.Reserve(column.length()), reading(name));
  for (const auto& chunk : values->chunks()) {
    for (const std::optional<double>& value : static_cast<const arrow::DoubleArray&>(*chunk)) {
      if (!value || std::isnan(*value)) {
        builder.UnsafeAppendNull();
        continue;
      }
      if (std::isinf(*value)) {
        throw std::runtime_error(
            fmt::format("the column '{}' has an infinite value in row {}; remove the row, or leave the value empty",
                        name, builder.length() + 1));
      }
      builder.UnsafeAppend(*value * static_cast<double>(unit.num_s) / static_cast<double>(unit.divisor));
    }
  }
  return std::static_pointer_cast<arrow::DoubleArray>(value_of(builder.Finish(), reading(name)));
}

Column seconds_of(const std::string& name, const arrow::ChunkedArray& column) {
  const TimeUnit unit = unit_of(value_type(column));
  arrow::Int64Builder builder;
  check_status(builder.Reserve(column.length()), reading(name));
  const Column integers = time_integers(name, *decoded(name, column));
  for (const auto& chunk : integers->chunks()) {
    for (const std::optional<int64_t>& value : static_cast<const arrow::Int64Array&>(*chunk)) {
      if (!value) {
        builder.UnsafeAppendNull();
      } else {
        builder.UnsafeAppend(floor_divide(*value, unit.divisor) * unit.num_s);
      }
    }
  }
  return std::make_shared<arrow::ChunkedArray>(value_of(builder.Finish(), reading(name)));
}

Column keys_of(const std::string& name, const arrow::ChunkedArray& column,
               const std::shared_ptr<arrow::DataType>& if_empty) {
  const arrow::DataType& type = value_type(column);
  const auto safe = arrow::compute::CastOptions::Safe();
  if (type.id() == arrow::Type::NA) return cast(name, column, if_empty, safe);
  if (is_text(type)) return cast(name, *decoded(name, column), arrow::large_utf8(), safe);
  if (is_boolean(type) || arrow::is_integer(type.id())) return cast(name, *decoded(name, column), arrow::int64(), safe);
  if (!is_number(type)) {
    throw std::runtime_error(
        fmt::format("the column '{}' has the type {}, which is no category; leave it out", name, type.ToString()));
  }
  const auto numbers = numbers_of(name, column);
  for (int64_t row = 0; row < numbers->length(); ++row) {
    if (numbers->IsNull(row) || (std::trunc(numbers->Value(row)) == numbers->Value(row))) continue;
    throw std::runtime_error(fmt::format(
        "the column '{}' has {} in row {}: a category is text or a whole number; name the column in features, or set "
        "target_type to number if it is the target",
        name, numbers->Value(row), row + 1));
  }
  return cast(name, arrow::ChunkedArray(numbers), arrow::int64(), safe);
}

void load_compute_functions() {
  static const arrow::Status status = arrow::compute::Initialize();
  check_status(status, "cannot load Arrow's functions");
}

}  // namespace fulgur
