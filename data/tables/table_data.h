#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "fulgur/base/describe.h"
#include "fulgur/data/data_module.h"
#include "fulgur/data/tables/read_table.h"
#include "fulgur/data/tables/table_schema.h"
#include "fulgur/data/tensor_dataset.h"

namespace fulgur {

struct TableDataOptions {
  std::filesystem::path path{};      // file with the rows for training, and for each part without a file of its own
  std::filesystem::path val_path{};  // file for validation; empty: val_fraction of the rows of path
  std::filesystem::path test_path{};
  double val_fraction = 0.1;
  double test_fraction = 0.1;
  int64_t batch_size = 32;  // samples
  ReadTableOptions read{};
  TableSchemaOptions schema{};
  void describe(FieldVisitor& visit);
};

// A table in a file, split by the seed into parts for training, validation and test, and made into tensors by a
// TableSchema that is fitted on the part for training:
//   int main(int argc, char** argv) { return cli::run<Regression, TableData>(argc, argv); }
//   ./program --data.path=houses.csv --data.schema.target=price
// Each part is in memory, as contiguous tensors. Checkpoints have the schema, so that test and validate, also on other
// files, use what training has learnt. Columns that were text in training are read as text from every file. A part
// without rows has no loader.
// Checkpoints have the seed and the fractions of the split, too: a run with a checkpoint cuts `path` into the parts
// that training had, whatever the options say, and logs a line if they say something else. So no row that was trained
// on is tested. If `path` has another number of rows than in training, it is another table, which the options split.
// Errors: setup throws as read_table and TableSchema do, and names the file; so does load_state, which reads the files
// again if the checkpoint's schema has other columns of text, or its split is another one.
class TableData : public DataModule {
 public:
  using Options = TableDataOptions;
  TableData(Options options, uint64_t seed);

  void setup(EntryPoint entry_point) override;
  std::shared_ptr<Loader> train_dataloader() override;
  LoaderList val_dataloader() override;
  LoaderList test_dataloader() override;
  State state() const override;
  void load_state(const State& state) override;

  const TableSchema& schema() const { return *schema_; }  // after setup

 private:
  struct Part {
    std::filesystem::path file;
    std::shared_ptr<arrow::Table> table;
  };

  // How the rows of `path` become parts.
  struct Split {
    uint64_t seed = 0;
    double val_fraction = 0;   // 0 where validation has a file of its own
    double test_fraction = 0;  // 0 where test has a file of its own
    bool operator==(const Split&) const = default;
  };
  struct SavedSplit {
    Split split{};
    int64_t num_rows = 0;  // rows that `path` had
  };

  static std::optional<SavedSplit> saved_split(const State& state);
  Split split_of_options() const;
  Split split_for(int64_t num_rows) const;  // the checkpoint's, if it has one for so many rows
  void log_other_split() const;
  void read_parts();  // also fits the schema if there is none
  std::shared_ptr<arrow::Table> read(const std::filesystem::path& file) const;
  std::shared_ptr<TensorDataset> dataset(const Part& part) const;  // null for a part without rows

  Options options_;
  uint64_t seed_;
  int64_t num_rows_ = 0;               // rows of `path`; 0 until it is read
  Split split_{};                      // the split that made the parts
  std::optional<SavedSplit> saved_{};  // the checkpoint's split; nullopt: there is none
  Part train_{}, val_{}, test_{};
  std::optional<TableSchema> schema_{};
};

}  // namespace fulgur
