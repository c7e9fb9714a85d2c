#include "fulgur/data/tables/table_schema.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <arrow/array/array_primitive.h>
#include <arrow/chunked_array.h>
#include <arrow/compute/api_aggregate.h>
#include <arrow/datum.h>
#include <arrow/scalar.h>
#include <arrow/table.h>
#include <arrow/type.h>
#include <arrow/type_traits.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/data/tables/arrow_result.h"
#include "fulgur/data/tables/column.h"

namespace fulgur {
namespace {

void choose_by_type(const arrow::Table& table, TableSchemaOptions& options) {
  if (!options.features.empty() || !options.categories.empty() || !options.tensors.empty()) return;
  std::vector<std::string> left_out;
  for (const std::string& name : table.ColumnNames()) {
    if (name == options.target) continue;
    const auto column = find_column(table, name);
    const arrow::DataType& type = value_type(*column);
    if (is_number(type) || type.id() == arrow::Type::BOOL) {
      options.features.push_back(name);
    } else if (is_text(type)) {
      options.categories.push_back(name);
    } else {
      left_out.push_back(fmt::format("{} ({})", name, type.ToString()));
    }
  }
  if (left_out.empty()) return;
  log_info(
      "columns that are left out, because they are neither numbers, booleans nor text: {}; name points in time in "
      "features or tensors to use them",
      fmt::join(left_out, ", "));
}

void check_roles(const TableSchemaOptions& options) {
  std::set<std::string> names;
  const auto add = [&names](const std::string& name) {
    if (names.insert(name).second) return;
    throw UsageError(fmt::format(
        "the column '{}' is named twice; name it once in features, categories, tensors or as the target", name));
  };
  for (const auto* columns : {&options.features, &options.categories, &options.tensors}) {
    for (const std::string& name : *columns) add(name);
  }
  if (!options.target.empty()) add(options.target);
  for (const char* reserved : {"features", "category", "label"}) {
    if (std::ranges::find(options.tensors, reserved) == options.tensors.end()) continue;
    throw UsageError(fmt::format(
        "the column '{}' cannot be a tensor of its own, because that is the name of another tensor; rename it",
        reserved));
  }
}

// The row and the number of what is missing, for messages; nullopt if nothing is.
std::optional<std::string> missing_rows(const arrow::ChunkedArray& values) {
  if (values.null_count() == 0) return std::nullopt;
  int64_t first = 0;
  for (const auto& chunk : values.chunks()) {
    int64_t row = 0;
    while (row < chunk->length() && chunk->IsValid(row)) ++row;
    first += row;
    if (row < chunk->length()) break;
  }
  return fmt::format("{} of {} rows, the first is row {}", values.null_count(), values.length(), first + 1);
}

double number_of(const arrow::Result<arrow::Datum>& statistic, const std::string& column) {
  const auto scalar = value_of(statistic, column).scalar();
  return static_cast<const arrow::DoubleScalar&>(*scalar).value;
}

// Whether all values are the same, up to the rounding of their mean; scikit-learn's StandardScaler has this bound.
bool is_constant(double mean, double deviation, int64_t num_values) {
  const double count_epsilon = static_cast<double>(num_values) * std::numeric_limits<double>::epsilon();
  const double variance = deviation * deviation;
  return variance <= count_epsilon * variance + std::pow(count_epsilon * mean, 2);
}

// The first value that is not missing; the column must have one.
double first_value(const arrow::DoubleArray& values) {
  int64_t row = 0;
  while (values.IsNull(row)) ++row;
  return values.Value(row);
}

// Numbers that are not whole are fp64 here.
at::Tensor tensor_of(const std::string& name, const arrow::ChunkedArray& column) {
  const auto numbers = numbers_of(name, column);
  if (const auto missing = missing_rows(arrow::ChunkedArray(numbers))) {
    throw std::runtime_error(
        fmt::format("the column '{}' has no value in {}; name it in features, which fill them", name, *missing));
  }
  const arrow::DataType& type = value_type(column);
  if (arrow::is_integer(type.id()) || is_time(type)) {  // not by way of double, which has 53 bits
    at::Tensor integers = at::empty({column.length()}, at::kLong);
    auto* out = integers.mutable_data_ptr<int64_t>();
    const auto whole = is_time(type) ? seconds_of(name, column) : keys_of(name, column, arrow::int64());
    for (const auto& chunk : whole->chunks()) {
      for (const std::optional<int64_t>& value : static_cast<const arrow::Int64Array&>(*chunk)) *out++ = *value;
    }
    return integers;
  }
  // from_blob's tensor is only read, and copied by to().
  const at::Tensor values = at::from_blob(const_cast<double*>(numbers->raw_values()), {numbers->length()}, at::kDouble);
  const at::ScalarType dtype = type.id() == arrow::Type::BOOL ? at::kBool : at::kDouble;
  return values.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

constexpr std::pair<std::string_view, at::ScalarType> kTensorTypes[] = {
    {"float", at::kFloat}, {"int64", at::kLong}, {"bool", at::kBool}};

std::string_view name_of(at::ScalarType type) {
  return std::ranges::find(kTensorTypes, type, [](const auto& known) { return known.second; })->first;
}

// The tensor in the type that the column had in training. A file may have whole numbers only where training had others,
// or the other way round.
at::Tensor as_in_training(const std::string& name, const at::Tensor& values, at::ScalarType type) {
  const at::Tensor converted = values.to(type);
  if (type == at::kFloat) return converted;
  const at::Tensor differs = converted.to(values.scalar_type()).ne(values).flatten();
  if (!differs.any().item<bool>()) return converted;
  const int64_t row = differs.to(at::kByte).argmax().item<int64_t>();
  throw std::runtime_error(fmt::format("the column '{}' had the type {} in training, and is {} in row {}", name,
                                       name_of(type), values[row].item<double>(), row + 1));
}

// Throws if a number that is finite in the table is too large for fp32.
void check_fits(const std::string& column, double value, float encoded, int64_t row) {
  if (std::isfinite(encoded) || !std::isfinite(value)) return;
  throw std::runtime_error(
      fmt::format("the column '{}' has {:g} in row {}, which is too large for fp32; if it stands for a missing value, "
                  "leave the cell "
                  "empty",
                  column, value, row + 1));
}

std::string child_name(const char* kind, size_t index) { return fmt::format("{}/{}", kind, index); }

}  // namespace

void TableSchemaOptions::describe(FieldVisitor& visit) {
  visit({.name = "features", .help = "columns of numbers; with no columns named at all, their types decide"},
        &features);
  visit({.name = "categories", .help = "columns of text, integers or booleans that a model embeds"}, &categories);
  visit({.name = "tensors", .help = "columns that become tensors of their own names, unchanged"}, &tensors);
  visit({.name = "target", .help = "column of the label; empty: there is none", .is_common = true}, &target);
  visit({.name = "target_type",
         .help = "what the label is; automatic: floating point is a number, all else a category",
         .choices = {"automatic", "number", "category"}},
        &target_type);
  visit({.name = "standardize", .help = "scale features to mean 0 and standard deviation 1"}, &standardize);
  visit({.name = "missing", .help = "what stands for a missing feature", .choices = {"mean", "constant", "refuse"}},
        &missing);
  visit({.name = "constant", .help = "number for missing=constant, in the column's own unit"}, &constant);
  visit({.name = "has_missing_indicators", .help = "add a feature that is 1 where another is missing"},
        &has_missing_indicators);
}

TableSchema TableSchema::fit(const arrow::Table& train, TableSchemaOptions options) {
  check_fields("TableSchema", options);
  if (train.num_rows() == 0) throw std::runtime_error("the table for training has no rows");
  choose_by_type(train, options);
  check_roles(options);
  TableSchema schema;
  for (const std::string& column : options.features) {
    schema.features_.push_back(learn_feature(train, column, options));
  }
  for (const std::string& column : options.categories) {
    schema.categories_.push_back({column, Vocabulary::learn(column, *find_column(train, column))});
  }
  for (const std::string& column : options.tensors) {
    const at::ScalarType type = tensor_of(column, *find_column(train, column)).scalar_type();
    schema.tensors_.push_back({column, type == at::kDouble ? at::kFloat : type});
  }
  schema.target_ = options.target;
  if (!schema.target_.empty()) {
    const auto target = find_column(train, schema.target_);
    const bool is_class =
        options.target_type == TargetType::category ||
        (options.target_type == TargetType::automatic && !arrow::is_floating(value_type(*target).id()));
    if (is_class) schema.classes_ = Vocabulary::learn(schema.target_, *target);
    schema.encode_label(train);  // throws for a label that is missing
  }
  if (schema.features_.empty() && schema.categories_.empty() && schema.tensors_.empty()) {
    throw std::runtime_error("the table has no column of numbers, booleans or text besides the target");
  }
  return schema;
}

TableSchema::Feature TableSchema::learn_feature(const arrow::Table& train, const std::string& column,
                                                const TableSchemaOptions& options) {
  const auto values = numbers_of(column, *find_column(train, column));
  if (values->null_count() == values->length()) {
    throw std::runtime_error(fmt::format("the column '{}' has no values in training; leave it out", column));
  }
  const auto missing = missing_rows(arrow::ChunkedArray(values));
  if (missing && options.missing == MissingValues::refuse) {
    throw std::runtime_error(
        fmt::format("the column '{}' has no value in {}; set missing to mean or constant", column, *missing));
  }
  load_compute_functions();
  const arrow::Datum all(values);
  double mean = number_of(arrow::compute::Mean(all), column);
  double deviation = number_of(arrow::compute::Stddev(all, arrow::compute::VarianceOptions::Defaults()), column);
  if (!std::isfinite(mean) || !std::isfinite(deviation)) {
    throw std::runtime_error(
        fmt::format("the column '{}' has numbers that are too large for a mean and a deviation; if one of them stands "
                    "for a missing "
                    "value, leave the cell empty",
                    column));
  }
  if (is_constant(mean, deviation, values->length() - values->null_count())) {
    mean = first_value(*values);  // the mean is rounded
    deviation = 1;
  }
  Feature feature{.column = column, .has_indicator = missing && options.has_missing_indicators};
  if (options.missing != MissingValues::refuse) {
    feature.missing = options.missing == MissingValues::mean ? mean : options.constant;
  }
  if (options.standardize) {
    feature.mean = mean;
    feature.deviation = deviation;
  }
  return feature;
}

Batch TableSchema::encode(const arrow::Table& table) const {
  const Batch inputs = encode_inputs(table);
  return target_.empty() ? inputs : inputs.with("label", encode_label(table));
}

Batch TableSchema::encode_inputs(const arrow::Table& table) const {
  std::vector<Batch::Entry> entries;
  if (!features_.empty()) entries.emplace_back("features", encode_features(table));
  if (!categories_.empty()) entries.emplace_back("category", encode_categories(table));
  for (const Tensor& tensor : tensors_) {
    const at::Tensor values = tensor_of(tensor.column, *find_column(table, tensor.column));
    const at::ScalarType of_file = values.scalar_type() == at::kDouble ? at::kFloat : values.scalar_type();
    entries.emplace_back(tensor.column, as_in_training(tensor.column, values, tensor.type.value_or(of_file)));
  }
  return Batch(std::move(entries));
}

at::Tensor TableSchema::encode_features(const arrow::Table& table) const {
  const int64_t width = num_features();
  std::vector<std::shared_ptr<arrow::DoubleArray>> columns;  // all are read before memory for the result is requested
  for (const Feature& feature : features_) {
    columns.push_back(numbers_of(feature.column, *find_column(table, feature.column)));
    const auto missing = missing_rows(arrow::ChunkedArray(columns.back()));
    if (!missing || feature.missing) continue;
    throw std::runtime_error(
        fmt::format("the column '{}' has no value in {}; set missing to mean or constant", feature.column, *missing));
  }
  at::Tensor encoded = at::empty({table.num_rows(), width}, at::kFloat);
  auto* out = encoded.mutable_data_ptr<float>();
  int64_t indicator = static_cast<int64_t>(features_.size());
  for (size_t i = 0; i < features_.size(); ++i) {
    const Feature& feature = features_[i];
    const arrow::DoubleArray& values = *columns[i];
    const double missing = feature.missing.value_or(0);
    float* cell = out + i;
    for (int64_t row = 0; row < values.length(); ++row, cell += width) {
      const double value = values.IsNull(row) ? missing : values.Value(row);
      *cell = static_cast<float>((value - feature.mean) / feature.deviation);
      check_fits(feature.column, value, *cell, row);
    }
    if (!feature.has_indicator) continue;
    cell = out + indicator++;
    for (int64_t row = 0; row < values.length(); ++row, cell += width) *cell = values.IsNull(row) ? 1.0F : 0.0F;
  }
  return encoded;
}

at::Tensor TableSchema::encode_categories(const arrow::Table& table) const {
  std::vector<at::Tensor> columns;
  for (const Category& category : categories_) {
    const auto column = find_column(table, category.column);
    const at::Tensor indices = category.vocabulary.indices(category.column, *column).add_(1);
    columns.push_back(indices);
    const at::Tensor unknown = indices.eq(0);
    if (!unknown.any().item<bool>()) continue;
    const int64_t first = unknown.to(at::kByte).argmax().item<int64_t>();
    const std::string example = value_of(column->GetScalar(first), category.column)->ToString();
    log_warning(
        "the column '{}' has values that training did not have in {} of {} rows, such as '{}': their index is 0",
        category.column, unknown.sum().item<int64_t>(), indices.numel(), example);
  }
  return at::stack(columns, 1);
}

at::Tensor TableSchema::encode_label(const arrow::Table& table) const {
  const auto column = find_column(table, target_);
  const auto check_whole = [&](const arrow::ChunkedArray& values) {
    if (const auto rows = missing_rows(values)) {
      throw std::runtime_error(
          fmt::format("the target '{}' has no value in {}; remove these rows, or give them a label", target_, *rows));
    }
  };
  if (!classes_) {
    const auto numbers = numbers_of(target_, *column);
    check_whole(arrow::ChunkedArray(numbers));
    at::Tensor labels = at::empty({numbers->length()}, at::kFloat);
    auto* label = labels.mutable_data_ptr<float>();
    for (int64_t row = 0; row < numbers->length(); ++row) {
      label[row] = static_cast<float>(numbers->Value(row));
      check_fits(target_, numbers->Value(row), label[row], row);
    }
    return labels;
  }
  check_whole(*keys_of(target_, *column, arrow::large_utf8()));
  at::Tensor labels = classes_->indices(target_, *column);
  const at::Tensor unknown = labels.lt(0);
  if (unknown.any().item<bool>()) {
    const int64_t row = unknown.to(at::kByte).argmax().item<int64_t>();
    throw std::runtime_error(fmt::format("the target '{}' has the class '{}' in row {}, which training did not have",
                                         target_, value_of(column->GetScalar(row), target_)->ToString(), row + 1));
  }
  return labels;
}

int64_t TableSchema::num_features() const {
  const auto indicators = std::ranges::count_if(features_, &Feature::has_indicator);
  return static_cast<int64_t>(features_.size()) + indicators;
}

std::vector<int64_t> TableSchema::category_sizes() const {
  std::vector<int64_t> sizes;
  for (const Category& category : categories_) sizes.push_back(category.vocabulary.size() + 1);
  return sizes;
}

int64_t TableSchema::num_classes() const { return classes_ ? classes_->size() : 0; }

std::vector<std::string> TableSchema::class_names() const {
  std::vector<std::string> names;
  for (int64_t label = 0; label < num_classes(); ++label) names.push_back(classes_->text(label));
  return names;
}

std::vector<std::string> TableSchema::text_columns() const {
  std::vector<std::string> names;
  for (const Category& category : categories_) {
    if (category.vocabulary.has_text()) names.push_back(category.column);
  }
  if (classes_ && classes_->has_text()) names.push_back(target_);
  return names;
}

State TableSchema::state() const {
  State state;
  for (size_t i = 0; i < features_.size(); ++i) {
    State feature;
    feature.set("column", features_[i].column);
    feature.set("mean", features_[i].mean);
    feature.set("deviation", features_[i].deviation);
    feature.set("has_indicator", features_[i].has_indicator);
    if (features_[i].missing) feature.set("missing", *features_[i].missing);
    state.set_child(child_name("features", i), feature);
  }
  for (size_t i = 0; i < categories_.size(); ++i) {
    State category = categories_[i].vocabulary.state();
    category.set("column", categories_[i].column);
    state.set_child(child_name("categories", i), category);
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    state.set(child_name("tensors", i), tensors_[i].column);
    if (tensors_[i].type) state.set(child_name("tensor_types", i), std::string(name_of(*tensors_[i].type)));
  }
  state.set("target", target_);
  if (classes_) state.set_child("classes", classes_->state());
  return state;
}

TableSchema TableSchema::from_state(const State& state) {
  TableSchema schema;
  for (State child; !(child = state.child(child_name("features", schema.features_.size()))).empty();) {
    const double* missing = child.find<double>("missing");
    schema.features_.push_back({.column = child.get<std::string>("column"),
                                .mean = child.get<double>("mean"),
                                .deviation = child.get<double>("deviation"),
                                .missing = missing != nullptr ? std::optional(*missing) : std::nullopt,
                                .has_indicator = child.get<bool>("has_indicator")});
  }
  for (State child; !(child = state.child(child_name("categories", schema.categories_.size()))).empty();) {
    schema.categories_.push_back({child.get<std::string>("column"), Vocabulary::from_state(child)});
  }
  while (const auto* column = state.find<std::string>(child_name("tensors", schema.tensors_.size()))) {
    const auto* type = state.find<std::string>(child_name("tensor_types", schema.tensors_.size()));
    const auto* known = type == nullptr
                            ? std::end(kTensorTypes)
                            : std::ranges::find(kTensorTypes, *type, [](const auto& each) { return each.first; });
    schema.tensors_.push_back({*column, known == std::end(kTensorTypes) ? std::nullopt : std::optional(known->second)});
  }
  schema.target_ = state.get<std::string>("target");
  if (const State classes = state.child("classes"); !classes.empty()) schema.classes_ = Vocabulary::from_state(classes);
  return schema;
}

}  // namespace fulgur
