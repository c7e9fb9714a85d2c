#include "fulgur/reports/metric_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
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

// The rows of a file: numbers with commas in between.
class RowReader {
 public:
  explicit RowReader(MetricTable& table) : table_(table), values_(table.curves.size()) {}

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
    for (size_t i = 0; i < values_.size(); ++i) {
      if (!values_[i].is_empty) table_.curves[i].points.push_back({.step = step, .value = values_[i].number});
    }
    ++table_.num_rows;
    table_.last_epoch = epoch;
    table_.last_step = step;
  }

  MetricTable& table_;
  std::vector<Cell> values_;
  const char* cell_begin_ = nullptr;  // null after the last cell
  const char* row_end_ = nullptr;
};

}  // namespace

const MetricCurve* MetricTable::find(std::string_view name) const {
  const auto found = std::ranges::find(curves, name, &MetricCurve::name);
  return found == curves.end() ? nullptr : &*found;
}

MetricTable parse_metric_table(std::string_view text, std::string_view name) {
  MetricTable table;
  const bool is_ours = begins_as_ours(text);
  const auto header = take_header(text);
  if (!is_ours || (header && (*header)[1] != "step")) {
    throw UsageError(
        fmt::format("'{}' was not written by a CSVLogger: its first line does not begin with {}", name, kFirstColumns));
  }
  table.has_torn_row = !header;
  if (!header) return table;
  for (size_t i = kNumFirstColumns; i < header->size(); ++i) table.curves.push_back({.name = (*header)[i]});
  RowReader rows(table);
  for (int64_t line = 2; !text.empty(); ++line) {
    const size_t length = text.find('\n');
    const std::string_view row = text.substr(0, length);
    text.remove_prefix(length == text.npos ? text.size() : length + 1);
    const std::string problem = length == text.npos ? "has no end" : rows.add(row);
    if (problem.empty()) continue;
    table.has_torn_row = text.empty();
    if (!text.empty()) {
      throw UsageError(fmt::format("'{}' was not written by a CSVLogger: line {} {}", name, line, problem));
    }
  }
  return table;
}

MetricTable read_metric_table(const fs::path& file) {
  std::error_code error;
  const auto num_bytes = fs::file_size(file, error);
  std::ifstream stream(file, std::ios::binary);
  if (error || !stream) {
    throw UsageError(fmt::format("'{}' cannot be read: {}", file.string(), error ? error.message() : "no permission"));
  }
  std::string text(num_bytes, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(num_bytes));
  text.resize(static_cast<size_t>(stream.gcount()));
  return parse_metric_table(text, file.string());
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
