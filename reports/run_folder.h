#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/reports/metric_table.h"

namespace fulgur {

struct CheckpointSummary {
  std::string name;
  std::optional<int64_t> step{};          // optimizer steps taken; nullopt: the checkpoint does not say
  int64_t num_bytes = 0;                  // sum over its files, without the manifest; at most 2^63 - 1
  std::string monitor{};                  // the metric that the score is of; empty if there is no score
  std::optional<double> score{};          // as ModelCheckpoint has noted it in the newest checkpoint
  bool is_best = false, is_last = false;  // whether the link `best` or `last` points to it
};

// What a run has left in its folder, as cli::run, CSVLogger and ModelCheckpoint write it. Each part may be missing.
struct RunFolder {
  std::string name;                                      // the path that was asked for
  std::filesystem::path metrics_file{};                  // empty: there is none
  std::chrono::system_clock::time_point metrics_time{};  // the last write before the file was read
  MetricTable metrics{};
  std::map<std::string, std::string> config{};                     // all options by name, as text
  std::vector<std::pair<std::string, std::string>> environment{};  // in the order of env.json
  std::vector<CheckpointSummary> checkpoints{};                    // by step
  std::vector<std::pair<std::string, std::string>> profiles{};     // name and text of each table that a profiler wrote
  std::vector<std::string> notes{};                                // sentences about what is missing or incomplete
  std::string last_output{};                                       // last line of log.txt; only for ProgressReader

  const std::string* find_environment(std::string_view key) const;  // null if env.json does not have it
};

// True if the folder holds a file that a run writes.
bool is_run_folder(const std::filesystem::path& folder);

// Reads a folder, in which a run may be in progress: what is incomplete is left out and noted. If several runs have
// written into the folder, the files of the newest are read (config-v2.toml, env-v1.json). Among metrics.csv and
// metrics-v1.csv, that is the file that was written last, for a run that resumes continues its old one. But a file
// without rows of training, whose last row is at step 0 of epoch 0 as after a test of a checkpoint, and which has no
// metric of training such as train_loss, never hides one that has them: a note says what is in it. Throws UsageError if
// there is no such folder, with the nearest name that exists; if nothing in the folder is of a run (see is_run_folder);
// if its metrics were not written by a CSVLogger.
RunFolder read_run_folder(const std::filesystem::path& folder);

// Reads a folder again and again while the run is in progress: the same without checkpoints, config and profiles, and
// with the last line of log.txt. Of the metrics it reads what is new.
class ProgressReader {
 public:
  explicit ProgressReader(std::filesystem::path folder);

  const RunFolder& read();  // valid until the next call
  int64_t num_metric_bytes() const {
    return metrics_.num_bytes_read();
  }  // number of bytes that the last read() took of the metrics file that is shown

 private:
  const std::filesystem::path folder_;
  GrowingMetricFile metrics_{""};
  RunFolder run_{};
};

}  // namespace fulgur
