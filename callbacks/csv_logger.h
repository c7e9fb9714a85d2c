#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/callback.h"

namespace fulgur {

struct CSVLoggerOptions {
  std::filesystem::path file{};  // must not exist, unless the run goes on; empty: metrics.csv in the run's folder
};

// Writes metrics as they come to a CSV file, with the columns epoch, step and one per metric, sorted; a cell is empty
// where a metric has no value. Metrics of the same epoch and step share a row. The file is complete after each row; a
// metric that turns up later rewrites it with one more column. A run that goes on from a checkpoint goes on in the file
// that it finds, behind the rows that it had written when it was saved. Another run in the same folder (of the same
// name) writes metrics-v1.csv.
class CSVLogger final : public Callback {
 public:
  using Options = CSVLoggerOptions;
  explicit CSVLogger(Options options = {});
  static std::shared_ptr<CSVLogger> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }
  bool runs_in_fast_dev_run() const override { return false; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;  // throws SetupError: the file exists
  void on_fit_start(TrainerControl& trainer) override;
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override;  // throws std::runtime_error
  State state() const override;
  void load_state(const State& state) override;

  const std::filesystem::path& file() const { return options_.file; }  // empty before the first row if it was at first

 private:
  struct Row {
    int64_t epoch, step;
    Metrics metrics;
  };

  void choose_file(TrainerControl& trainer);
  void check_new() const;
  void read_rows(size_t num_rows);
  bool add_columns(const Metrics& metrics);  // true if there were new ones
  std::string format(const Row& row) const;
  void write_all() const;
  void append(const Row& row) const;

  Options options_;
  std::vector<std::string> columns_;  // sorted
  std::vector<Row> rows_;
  std::optional<size_t> resumed_rows_{};  // until they are read
  std::string resumed_name_{};            // of the file that they are in
  bool starts_row_ = false;               // a new run does not go on in the row of the last one
};

}  // namespace fulgur
