#include "fulgur/data/tables/table_data.h"

#include <arrow/table.h>
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tables/split_table.h"

namespace fulgur {
namespace {

// Puts the file before the message of an error about what is in it.
template <class Call>
auto naming(const std::filesystem::path& file, const Call& call) {
  try {
    return call();
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("'{}': {}", file.string(), error.what()));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("'{}': {}", file.string(), error.what()));
  }
}

}  // namespace

void TableDataOptions::describe(FieldVisitor& visit) {
  visit({.name = "path", .help = "file of the table: CSV, JSON lines, Parquet or Arrow", .is_common = true}, &path);
  visit({.name = "val_path", .help = "file for validation; empty: a part of path"}, &val_path);
  visit({.name = "test_path", .help = "file for test; empty: a part of path"}, &test_path);
  visit({.name = "val_fraction", .help = "part of the rows for validation", .min = 0, .max = 1}, &val_fraction);
  visit({.name = "test_fraction", .help = "part of the rows for test", .min = 0, .max = 1}, &test_fraction);
  visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
  visit({.name = "read"}, &read);
  visit({.name = "schema"}, &schema);
}

TableData::TableData(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {
  check_fields("TableData", options_);
  if (options_.path.empty()) throw UsageError("TableData: there is no file; give its path with --data.path");
}

void TableData::setup(EntryPoint) {
  if (!schema_) read_parts();
}

void TableData::load_state(const State& state) {
  if (state.empty()) return;
  const auto text_columns = schema_ ? std::optional(schema_->text_columns()) : std::nullopt;
  schema_ = TableSchema::from_state(state);
  if (text_columns != schema_->text_columns()) read_parts();
}

void TableData::read_parts() {
  const double val = options_.val_path.empty() ? options_.val_fraction : 0;
  const double test = options_.test_path.empty() ? options_.test_fraction : 0;
  if (!(val + test < 1)) {
    throw UsageError(fmt::format(
        "TableData: val_fraction ({}) and test_fraction ({}) leave no rows for training; lower them", val, test));
  }
  const auto parts = split_table(*read(options_.path), {1 - val - test, val, test}, seed_);
  train_ = {options_.path, parts[0]};
  if (!schema_) schema_ = naming(train_.file, [&] { return TableSchema::fit(*train_.table, options_.schema); });
  const auto part = [&](const std::filesystem::path& file, size_t index) {
    return file.empty() ? Part{options_.path, parts[index]} : Part{file, read(file)};
  };
  val_ = part(options_.val_path, 1);
  test_ = part(options_.test_path, 2);
}

std::shared_ptr<arrow::Table> TableData::read(const std::filesystem::path& file) const {
  return read_table(file, options_.read, schema_ ? schema_->text_columns() : std::vector<std::string>());
}

std::shared_ptr<TensorDataset> TableData::dataset(const Part& part) const {
  if (part.table->num_rows() == 0) return nullptr;
  return naming(part.file, [&] { return TensorDataset::make(schema_->encode(*part.table)); });
}

std::shared_ptr<Loader> TableData::train_dataloader() {
  return DataLoader::make(dataset(train_), {.batch_size = options_.batch_size, .shuffle = true, .seed = seed_});
}

LoaderList TableData::val_dataloader() {
  const auto samples = dataset(val_);
  return samples ? LoaderList(DataLoader::make(samples, {.batch_size = options_.batch_size})) : nullptr;
}

LoaderList TableData::test_dataloader() {
  const auto samples = dataset(test_);
  return samples ? LoaderList(DataLoader::make(samples, {.batch_size = options_.batch_size})) : nullptr;
}

}  // namespace fulgur
