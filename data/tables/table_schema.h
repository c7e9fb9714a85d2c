#pragma once

#include <arrow/type_fwd.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/state.h"
#include "fulgur/core/batch.h"
#include "fulgur/data/tables/vocabulary.h"

namespace fulgur {

enum class TargetType { automatic, number, category };
enum class MissingValues { mean, constant, refuse };

// Which column is what. If features, categories and tensors are all empty, each column of numbers or booleans is a
// feature and each column of text a category, but for the target; the log names the columns that are left out.
struct TableSchemaOptions {
  std::vector<std::string> features{};    // numbers, booleans (0 and 1), points in time (seconds since 1970 UTC)
  std::vector<std::string> categories{};  // text, integers, booleans
  std::vector<std::string> tensors{};     // columns that become tensors of their own names, as they are
  std::string target{};                   // column of the label; empty: there is none
  TargetType target_type = TargetType::automatic;  // automatic: floating point is a number, all else a category
  bool standardize = true;                         // features: (x - mean) / standard deviation
  MissingValues missing = MissingValues::mean;     // features: what stands for a missing value
  double constant = 0;                             // for MissingValues::constant, in the column's own unit
  bool has_missing_indicators =
      false;  // adds a feature, 1 where the value is missing, for each feature with missing values in training
  void describe(FieldVisitor& visit);
};

// Makes tensors of tables, by what it has learnt from the rows for training: means, standard deviations, categories.
//   const TableSchema schema = TableSchema::fit(*train, {.target = "price"});
//   const auto dataset = TensorDataset::make(schema.encode(*val));
// A value: it can be copied, saved in a checkpoint as state(), and used on another table, whose columns are found by
// name.
// Tensors of a table with N rows:
//   "features"   float [N, num_features()]; missing indicators come last
//   "category"   int64 [N, C]: 0 for a value that training did not have, then 1, 2, ... for those that it had, sorted;
//                a missing value is one of them, the last, if training had any
//   "label"      int64 [N]: the class, from 0, in sorted order; or float [N] for a target that is a number
//   <name>       float, int64 or bool [N] for each of `tensors`, by the column's type; points in time are int64 seconds
// "features" and "category" are left out if there are no such columns.
// Statistics are those of the values that are there, with the population's standard deviation, in double precision, as
// scikit-learn's StandardScaler has them. A feature that is constant, but for rounding, is divided by 1.
// Threading: const members may be called by several threads at once.
class TableSchema {
 public:
  // Throws UsageError for an unknown column, with the nearest name, or one that is named twice; std::runtime_error for
  // a column whose type or values do not suit its use, a label that is missing, or a table without rows.
  static TableSchema fit(const arrow::Table& train, TableSchemaOptions options);

  // Throws CheckpointError for a state that is not a schema's.
  static TableSchema from_state(const State& state);
  State state() const;

  // Throws as fit does. For categories that training did not have, one warning per column counts them; a class that
  // training did not have is an error.
  Batch encode(const arrow::Table& table) const;
  Batch encode_inputs(const arrow::Table& table) const;  // without the label, whose column need not be there

  int64_t num_features() const;                  // width of "features"
  std::vector<int64_t> category_sizes() const;   // one per category: number of rows that its embedding needs
  int64_t num_classes() const;                   // 0 if the target is a number, or there is none
  std::vector<std::string> class_names() const;  // by label

  // The columns of categories, and the target if it is a class, that were text in training. Pass them to read_table for
  // another CSV or JSON file: otherwise 01 is read as 1 where all values of a column look like numbers.
  std::vector<std::string> text_columns() const;

 private:
  struct Feature {
    std::string column;
    double mean = 0;                  // subtracted
    double deviation = 1;             // divides
    std::optional<double> missing{};  // stands for a missing value; nullopt: a missing value is refused
    bool has_indicator = false;
  };
  struct Category {
    std::string column;
    Vocabulary vocabulary;
  };
  struct Tensor {
    std::string column;
    std::optional<c10::ScalarType> type{};  // in training; nullopt: the state of an earlier version does not say
  };

  static Feature learn_feature(const arrow::Table& train, const std::string& column, const TableSchemaOptions& options);
  at::Tensor encode_features(const arrow::Table& table) const;
  at::Tensor encode_categories(const arrow::Table& table) const;
  at::Tensor encode_label(const arrow::Table& table) const;

  std::vector<Feature> features_{};
  std::vector<Category> categories_{};
  std::vector<Tensor> tensors_{};
  std::string target_{};                 // empty: none
  std::optional<Vocabulary> classes_{};  // nullopt: the target is a number, or there is none
};

}  // namespace fulgur
