#include "fulgur/data/tables/table_data.h"

#include <arrow/table.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
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

// The tensors are in memory, so that their content can be hashed.
std::string digest_of(const Batch& samples) {
  uint64_t hash = 0;
  for (const auto& [name, tensor] : samples) {
    const at::Tensor values = tensor.contiguous();
    hash = XXH3_64bits_withSeed(name.data(), name.size(), hash);
    hash = XXH3_64bits_withSeed(values.const_data_ptr(), values.nbytes(), hash);
  }
  return fmt::format("{:016x}", hash);
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

State TableData::state() const {
  if (!schema_) return {};
  State split;
  split.set("seed", static_cast<int64_t>(split_.seed));
  split.set("val_fraction", split_.val_fraction);
  split.set("test_fraction", split_.test_fraction);
  split.set("num_rows", num_rows_);
  State state = schema_->state();
  state.set_child("split", split);
  return state;
}

void TableData::load_state(const State& state) {
  if (state.empty()) return;
  const auto text_columns = schema_ ? std::optional(schema_->text_columns()) : std::nullopt;
  schema_ = TableSchema::from_state(state);
  saved_ = saved_split(state.child("split"));
  if (text_columns != schema_->text_columns() || split_ != split_for(num_rows_)) read_parts();
  log_other_split();
}

// Checkpoints of earlier versions have no split.
std::optional<TableData::SavedSplit> TableData::saved_split(const State& state) {
  if (state.empty()) return std::nullopt;
  const Split split{.seed = static_cast<uint64_t>(state.get<int64_t>("seed")),
                    .val_fraction = state.get<double>("val_fraction"),
                    .test_fraction = state.get<double>("test_fraction")};
  if (!(split.val_fraction >= 0 && split.test_fraction >= 0 && split.val_fraction + split.test_fraction < 1)) {
    throw CheckpointError(
        fmt::format("the checkpoint's val_fraction ({}) and test_fraction ({}) are no parts of a table",
                    split.val_fraction, split.test_fraction));
  }
  return SavedSplit{.split = split, .num_rows = state.get<int64_t>("num_rows")};
}

TableData::Split TableData::split_of_options() const {
  const double val = options_.val_path.empty() ? options_.val_fraction : 0;
  const double test = options_.test_path.empty() ? options_.test_fraction : 0;
  if (!(val + test < 1)) {
    throw UsageError(fmt::format(
        "TableData: val_fraction ({}) and test_fraction ({}) leave no rows for training; lower them", val, test));
  }
  return {.seed = seed_, .val_fraction = val, .test_fraction = test};
}

TableData::Split TableData::split_for(int64_t num_rows) const {
  return saved_ && saved_->num_rows == num_rows ? saved_->split : split_of_options();
}

// Fractions of parts that have files of their own are no difference.
void TableData::log_other_split() const {
  if (!saved_) return;
  const Split& saved = saved_->split;
  const std::string file = options_.path.string();
  if (saved_->num_rows != num_rows_) {
    if (split_.val_fraction + split_.test_fraction == 0) return;
    log_warning(
        "'{}' has {} rows, but the table that the checkpoint was trained on had {}: it is split by the options, so "
        "that rows of training, if it has them, may be in the parts for validation and test",
        file, num_rows_, saved_->num_rows);
    return;
  }
  const bool is_other = saved.seed != seed_ ||
                        (options_.val_path.empty() && saved.val_fraction != options_.val_fraction) ||
                        (options_.test_path.empty() && saved.test_fraction != options_.test_fraction);
  if (!is_other) return;
  log_info(
      "'{}' is split as in the checkpoint's training, by seed {} with {} of the rows for validation and {} for test; "
      "the options say seed {}, {} and {}",
      file, saved.seed, saved.val_fraction, saved.test_fraction, seed_, options_.val_fraction, options_.test_fraction);
}

void TableData::read_parts() {
  static_cast<void>(split_of_options());  // throws before the file is read
  auto table = read(options_.path);
  num_rows_ = table->num_rows();
  split_ = split_for(num_rows_);
  const auto [seed, val, test] = split_;
  const auto parts = split_table(*table, {1 - val - test, val, test}, seed);
  table.reset();
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
  return naming(part.file, [&] {
    Batch samples = schema_->encode(*part.table);
    std::string digest = digest_of(samples);
    return TensorDataset::make(std::move(samples), std::move(digest));
  });
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
