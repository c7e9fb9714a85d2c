#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fulgur {

struct MetricPoint {
  int64_t step = 0;  // optimizer step, counted from 0: at step 9 ten are taken
  double value = 0.0;
};

// The values of one metric, in the order of the rows that have one.
struct MetricCurve {
  std::string name;
  std::vector<MetricPoint> points{};
};

// What a CSVLogger has written.
struct MetricTable {
  std::vector<MetricCurve> curves{};  // in the order of the columns; a metric without a value has no points
  int64_t num_rows = 0;
  int64_t last_epoch = 0;  // 0 without rows
  // The step of the last row that counts optimizer steps; 0 without such a row. A row that has only values logged by
  // the batch in validation or test, such as "val_loss_step", counts their batches instead.
  int64_t last_step = 0;
  bool has_torn_row = false;  // the last row was incomplete, and was left out

  const MetricCurve* find(std::string_view name) const;  // null if there is none
};

// Reads a file that may be written meanwhile: a last row that is incomplete is left out. Throws UsageError, naming the
// file, the line and the reason, for a file that no CSVLogger has written.
MetricTable read_metric_table(const std::filesystem::path& file);

// The same for the text of a file; `name` is for messages.
MetricTable parse_metric_table(std::string_view text, std::string_view name);

// A file that is read again and again while a run writes it. A call reads only the rows that are new, and the last row,
// which may still change. It reads the whole file if the file was replaced or older rows have changed, as happens when
// a run resumes.
class GrowingMetricFile {
 public:
  explicit GrowingMetricFile(std::filesystem::path path) : path_(std::move(path)) {}

  const std::filesystem::path& path() const { return path_; }

  // `before` is what the last call returned, or an empty table. Throws as read_metric_table().
  MetricTable read(MetricTable before);
  int64_t num_bytes_read() const { return num_bytes_read_; }  // the bytes that the last read() took

 private:
  // What is known of the file without its last row.
  struct Settled {
    uint64_t inode = 0;
    int64_t num_bytes = 0;  // 0: nothing is read yet
    std::string end{};      // the last bytes of the part that was read; they tell whether the file still begins with it
    std::vector<size_t> num_points{};  // number of points of each curve
    int64_t num_rows = 0, last_epoch = 0, last_step = 0;
  };

  bool is_continued(std::istream& stream, int64_t num_bytes, uint64_t inode, const MetricTable& table) const;
  void forget_last_row(MetricTable& table) const;
  void settle(const MetricTable& table, std::string_view bytes);

  std::filesystem::path path_;
  Settled settled_{};
  int64_t num_rows_ = 0;  // number of rows of the table that was returned last
  int64_t num_bytes_read_ = 0;
};

// What a metric is about, judged by its name, in the order of a report.
enum class MetricKind {
  loss,          // a name that contains "loss"
  score,         // any other metric of the user
  optimization,  // LearningRateMonitor, GradientNormMonitor
  throughput,    // ThroughputMonitor; also the time spent waiting for data
  device,        // DeviceStatsMonitor: memory and computing time
};
MetricKind kind_of_metric(std::string_view name);

// True for metrics that are different in each repetition of a run, because they measure time or the machine.
bool measures_machine(std::string_view name);

}  // namespace fulgur
