#include "fulgur/reports/metric_table.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFirstColumns = "epoch,step";
constexpr size_t kNumFirstColumns = 2;

// A file that is being written may end within these words.
bool begins_as_ours(std::string_view text) {
  const size_t length = std::min(text.size(), kFirstColumns.size());
  return text.substr(0, length) == kFirstColumns.substr(0, length);
}

// Takes the header off the text: its cells, of which those with a comma, a quote or a newline are quoted (RFC 4180).
// Returns nullopt if the header has no end.
std::optional<std::vector<std::string>> take_header(std::string_view& text) {
  std::vector<std::string> cells(1);
  bool is_quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_quoted && c == '"' && i + 1 < text.size() && text[i + 1] == '"') {
      cells.back() += text[i++];
    } else if (c == '"') {
      is_quoted = !is_quoted;
    } else if (c == ',' && !is_quoted) {
      cells.emplace_back();
    } else if (c == '\n' && !is_quoted) {
      text.remove_prefix(i + 1);
      return cells;
    } else {
      cells.back() += c;
    }
  }
  return std::nullopt;
}

// Whether a Module has logged the metric both by the batch and by the epoch, and this is the one by the batch of a
// validation or test: "val_loss_step", "test_acc_step/dataloader_idx_1".
bool counts_evaluated_batches(std::string_view name) {
  if (!name.starts_with("val") && !name.starts_with("test")) return false;
  return name.substr(0, name.find("/dataloader_idx_")).ends_with("_step");
}

// The rows of a file: numbers with commas in between.
class RowReader {
 public:
  explicit RowReader(MetricTable& table) : table_(table) {
    for (const MetricCurve& curve : table.curves) {
      values_.push_back({.counts_evaluated_batches = counts_evaluated_batches(curve.name)});
    }
  }

  // Returns what is wrong with the row, which is then left out; empty if nothing is.
  std::string add(std::string_view row) {
    cell_begin_ = row.data();
    row_end_ = row.data() + row.size();
    int64_t epoch = 0, step = 0;
    if (!read(epoch) || !read(step)) return "does not begin with an epoch and a step";
    for (Cell& value : values_) {
      if (!has_more()) return fmt::format("has fewer cells than the header, which has {}", num_columns());
      value.is_empty = cell_begin_ == row_end_ || *cell_begin_ == ',';
      if (value.is_empty) {
        skip_comma();
      } else if (!read(value.number)) {
        return "has a cell that is no number";
      }
    }
    if (has_more()) return fmt::format("has more cells than the header, which has {}", num_columns());
    keep(epoch, step);
    return "";
  }

 private:
  struct Cell {
    double number = 0.0;
    bool is_empty = true;
    bool counts_evaluated_batches = false;
  };

  size_t num_columns() const { return values_.size() + kNumFirstColumns; }
  bool has_more() const { return cell_begin_ != nullptr; }

  // Goes to the next cell, if there is one.
  bool skip_comma() {
    if (cell_begin_ == row_end_) {
      cell_begin_ = nullptr;
      return true;
    }
    return *cell_begin_++ == ',';
  }

  template <class T>
  bool read(T& number) {
    if (!has_more()) return false;
    const auto [end, error] = std::from_chars(cell_begin_, row_end_, number);
    cell_begin_ = end;
    return error == std::errc() && skip_comma();
  }

  void keep(int64_t epoch, int64_t step) {
    size_t num_values = 0, num_by_batch = 0;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].is_empty) continue;
      table_.curves[i].points.push_back({.step = step, .value = values_[i].number});
      ++num_values;
      num_by_batch += values_[i].counts_evaluated_batches ? 1 : 0;
    }
    ++table_.num_rows;
    table_.last_epoch = epoch;
    if (num_values == 0 || num_by_batch < num_values) table_.last_step = step;
  }

  MetricTable& table_;
  std::vector<Cell> values_;
  const char* cell_begin_ = nullptr;  // null after the last cell
  const char* row_end_ = nullptr;
};

// Takes the header off the text and returns a table without rows. It has a torn row if the header is incomplete.
MetricTable take_header_of(std::string_view& text, std::string_view name) {
  const bool is_ours = begins_as_ours(text);
  const auto header = take_header(text);
  if (!is_ours || (header && (*header)[1] != "step")) {
    throw UsageError(
        fmt::format("'{}' was not written by a CSVLogger: its first line does not begin with {}", name, kFirstColumns));
  }
  MetricTable table;
  table.has_torn_row = !header;
  for (size_t i = kNumFirstColumns; header && i < header->size(); ++i) table.curves.push_back({.name = (*header)[i]});
  return table;
}

// Where the last line begins, which may be incomplete, or change as long as the run writes.
size_t begin_of_last_line(std::string_view text) {
  if (text.size() < 2) return 0;
  const size_t newline = text.rfind('\n', text.size() - 2);
  return newline == text.npos ? 0 : newline + 1;
}

// Adds whole rows, which come after those that the table has.
void add_rows(MetricTable& table, std::string_view text, std::string_view name) {
  RowReader rows(table);
  for (int64_t line = table.num_rows + 2; !text.empty(); ++line) {
    const size_t length = text.find('\n');
    const std::string problem = rows.add(text.substr(0, length));
    text.remove_prefix(length + 1);
    if (!problem.empty()) {
      throw UsageError(fmt::format("'{}' was not written by a CSVLogger: line {} {}", name, line, problem));
    }
  }
}

// Adds the last row, unless it is incomplete.
void add_last_row(MetricTable& table, std::string_view line) {
  const bool is_whole = line.ends_with('\n') && RowReader(table).add(line.substr(0, line.size() - 1)).empty();
  table.has_torn_row = !line.empty() && !is_whole;
}

// The bytes from `begin` to `end`, or to the end of the file, which may be cut meanwhile.
std::string bytes_from(std::istream& stream, int64_t begin, int64_t end) {
  std::string bytes(static_cast<size_t>(end - begin), '\0');
  stream.clear();
  stream.seekg(begin);
  stream.read(bytes.data(), end - begin);
  bytes.resize(static_cast<size_t>(stream.gcount()));
  return bytes;
}

}  // namespace

const MetricCurve* MetricTable::find(std::string_view name) const {
  const auto found = std::ranges::find(curves, name, &MetricCurve::name);
  return found == curves.end() ? nullptr : &*found;
}

MetricTable parse_metric_table(std::string_view text, std::string_view name) {
  MetricTable table = take_header_of(text, name);
  if (table.has_torn_row) return table;
  const size_t settled = begin_of_last_line(text);
  add_rows(table, text.substr(0, settled), name);
  add_last_row(table, text.substr(settled));
  return table;
}

MetricTable read_metric_table(const fs::path& file) { return GrowingMetricFile(file).read({}); }

MetricTable GrowingMetricFile::read(MetricTable table) {
  std::ifstream stream(path_, std::ios::binary);
  struct stat status{};
  if (!stream || ::stat(path_.c_str(), &status) != 0) {
    throw UsageError(fmt::format("'{}' cannot be read: {}", path_.string(), std::strerror(errno)));
  }
  const bool has_grown = is_continued(stream, status.st_size, status.st_ino, table);
  if (!has_grown) settled_ = {.inode = status.st_ino};
  const std::string bytes = bytes_from(stream, settled_.num_bytes, status.st_size);
  num_bytes_read_ = static_cast<int64_t>(bytes.size());
  std::string_view rows = bytes;
  if (has_grown) {
    forget_last_row(table);
  } else {
    table = take_header_of(rows, path_.string());
    if (table.has_torn_row) return table;  // there is no whole header yet
  }
  const size_t num_settled = bytes.size() - rows.size() + begin_of_last_line(rows);
  add_rows(table, rows.substr(0, begin_of_last_line(rows)), path_.string());
  settle(table, std::string_view(bytes).substr(0, num_settled));
  add_last_row(table, rows.substr(begin_of_last_line(rows)));
  num_rows_ = table.num_rows;
  return table;
}

bool GrowingMetricFile::is_continued(std::istream& stream, int64_t num_bytes, uint64_t inode,
                                     const MetricTable& table) const {
  const auto end_size = static_cast<int64_t>(settled_.end.size());
  return settled_.num_bytes > 0 && settled_.inode == inode && num_bytes >= settled_.num_bytes &&
         table.num_rows == num_rows_ && table.curves.size() == settled_.num_points.size() &&
         bytes_from(stream, settled_.num_bytes - end_size, settled_.num_bytes) == settled_.end;
}

void GrowingMetricFile::forget_last_row(MetricTable& table) const {
  for (size_t i = 0; i < table.curves.size(); ++i) table.curves[i].points.resize(settled_.num_points[i]);
  table.num_rows = settled_.num_rows;
  table.last_epoch = settled_.last_epoch;
  table.last_step = settled_.last_step;
}

// `bytes`: the part of the file whose rows were added to the table since the last call.
void GrowingMetricFile::settle(const MetricTable& table, std::string_view bytes) {
  constexpr size_t kEndBytes = 256;
  settled_.num_bytes += static_cast<int64_t>(bytes.size());
  settled_.end += bytes.substr(bytes.size() - std::min(bytes.size(), kEndBytes));
  settled_.end.erase(0, settled_.end.size() - std::min(settled_.end.size(), kEndBytes));
  settled_.num_points.clear();
  for (const MetricCurve& curve : table.curves) settled_.num_points.push_back(curve.points.size());
  settled_.num_rows = table.num_rows;
  settled_.last_epoch = table.last_epoch;
  settled_.last_step = table.last_step;
}

MetricKind kind_of_metric(std::string_view name) {
  const bool is_throughput = name.ends_with("_per_sec") || name == "train/mfu" || name == "train/data_wait";
  if (name.starts_with("device/")) return MetricKind::device;
  if (is_throughput) return MetricKind::throughput;
  if (name.starts_with("lr-") || name == "grad_norm") return MetricKind::optimization;
  return name.find("loss") != name.npos ? MetricKind::loss : MetricKind::score;
}

bool measures_machine(std::string_view name) { return kind_of_metric(name) >= MetricKind::throughput; }

}  // namespace fulgur
