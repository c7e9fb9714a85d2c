#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/logging.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct CSVLoggerOptions {
  std::filesystem::path file{};  // must not exist, unless the run resumes; empty: metrics.csv in the run's folder
  void describe(FieldVisitor& visit);
};

// Writes metrics as they are logged to a CSV file, with the columns epoch, step and one per metric, sorted; a cell is
// empty where a metric has no value. Metrics of the same epoch and step share a row. The file is complete after each
// row. Only the last row is ever overwritten: a process that is killed loses no other row. A metric that is first
// logged later gets a column in a new file, which replaces the old one once it is complete. A run that resumes from a
// checkpoint continues in the file in its folder, after the rows that were written when the checkpoint was saved.
// Another run in the same folder (of the same name) writes metrics-v1.csv. So does a run that resumes from a checkpoint
// of another folder: a file is only continued if its last row is the row that the checkpoint knows. A file that has
// lost its last rows, because the machine stopped, is continued if its first row is that of the checkpoint's file.
class CSVLogger final : public Callback {
 public:
  using Options = CSVLoggerOptions;
  explicit CSVLogger(Options options = {});
  static std::shared_ptr<CSVLogger> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }
  bool runs_in_fast_dev_run() const override { return false; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;  // throws SetupError: the file exists
  void on_fit_start(TrainerControl& trainer) override;

  // Throws SetupError if a resumed file is not a CSVLogger's, and what the system says if the first row cannot be
  // written. If a later one cannot, because the disk is full, one warning is logged, and the file stays as it is.
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override;
  std::string state_key() const override { return changed_fields(options_); }
  State state() const override;                  // the loaded state until the next row is written
  void load_state(const State& state) override;  // throws CheckpointError: the state names no file

  const std::filesystem::path& file() const { return file_; }  // may be empty before the first row

 private:
  struct Row {
    int64_t epoch = 0, step = 0;
    Metrics metrics{};
  };

  void choose_file(TrainerControl& trainer);
  void check_new() const;
  static void check_ours(const std::filesystem::path& file);
  std::filesystem::path resumed_file(TrainerControl& trainer) const;
  void forget_file();
  bool read_rows(const State& resumed);
  std::vector<std::string> columns_with(const Metrics& metrics) const;
  static State state_of(const Row& row);
  static bool has_values(const Row& row, const State& known);
  static std::string format(const Row& row, const std::vector<std::string>& columns);
  void write(const Row& row, bool same_row);
  void rewrite(const Row& row, int64_t num_rows_before, const std::vector<std::string>& columns);
  void write_row(const Row& row, size_t begin);

  const Options options_;
  std::filesystem::path file_;
  std::vector<std::string> columns_;  // sorted
  Row first_row_{};                   // by which the file is known again
  Row row_{};                         // the last row, which may still change
  int64_t num_rows_ = 0;
  size_t rows_begin_ = 0, row_begin_ = 0, end_ = 0;  // bytes of the file before the rows, the last row, and its end
  std::optional<State> resumed_{};                   // the loaded state; nullopt once its rows are read
  bool starts_row_ = false;                          // a new run does not continue the last row of an older run
  WarnOnce warn_full_;
};

}  // namespace fulgur
