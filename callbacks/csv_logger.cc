#include "fulgur/callbacks/csv_logger.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <istream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/numbered_files.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFirstColumns = "epoch,step";

// A name with a comma or a quote is quoted (RFC 4180).
std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + '"';
}

// The cells of a line that csv_cell has written.
std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells(1);
  bool quoted = false, just_closed = false;
  for (const char c : line) {
    if (c == '"') {  // "" is one quote: the second reopens the cell
      if (!quoted && just_closed) cells.back() += c;
      just_closed = quoted;
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      just_closed = false;
      cells.emplace_back();
    } else {
      cells.back() += c;
    }
  }
  return cells;
}

[[noreturn]] void throw_write_error(const fs::path& file, const std::error_code& error) {
  throw std::runtime_error(fmt::format("cannot write '{}': {}", file.string(), error.message()));
}

// False at the end of the file, and for a line that breaks off there.
bool next_line(std::istream& stream, std::string& line) { return std::getline(stream, line) && !stream.eof(); }

std::string header_of(const std::vector<std::string>& columns) {
  std::string text(kFirstColumns);
  for (const std::string& column : columns) text += "," + csv_cell(column);
  return text + "\n";
}

// A row of the columns `before`, with an empty cell for each new column.
std::string widened(const std::string& line, const std::vector<std::string>& before,
                    const std::vector<std::string>& columns) {
  const std::vector<std::string> cells = split(line);
  std::string row = cells[0] + "," + cells[1];
  size_t next = 2;
  for (const std::string& column : columns) {
    row += ",";
    if (std::ranges::count(before, column) > 0) row += cells[next++];
  }
  return row + "\n";
}

}  // namespace

void CSVLoggerOptions::describe(FieldVisitor& visit) {
  visit({.name = "file", .help = "file to write; empty: metrics.csv in the run's folder"}, &file);
}

CSVLogger::CSVLogger(Options options) : options_(std::move(options)), file_(options_.file) {}

std::shared_ptr<CSVLogger> CSVLogger::make(Options options) { return std::make_shared<CSVLogger>(std::move(options)); }

void CSVLogger::setup(TrainerControl&, EntryPoint entry_point) {
  starts_row_ = true;
  if (entry_point != EntryPoint::fit) check_new();  // fit may resume in it
}

void CSVLogger::on_fit_start(TrainerControl& trainer) { resumed_ ? check_ours(resumed_file(trainer)) : check_new(); }

void CSVLogger::check_new() const {
  if (num_rows_ > 0 || file_.empty()) return;
  if (fs::exists(file_)) {
    throw SetupError(fmt::format("CSVLogger: '{}' exists and would be overwritten; move it away, or name another file",
                                 file_.string()));
  }
  if (file_.has_parent_path()) fs::create_directories(file_.parent_path());
}

// No file, or a part of a header, counts as ours: the process may have ended while it wrote the header.
void CSVLogger::check_ours(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream.is_open()) return;
  std::string line;
  std::getline(stream, line);
  const size_t length = std::min(line.size(), kFirstColumns.size());
  const bool is_whole = length == kFirstColumns.size() || stream.eof();
  if (is_whole && line.compare(0, length, kFirstColumns, 0, length) == 0) return;
  throw SetupError(fmt::format("CSVLogger: '{}' was not written by a CSVLogger, and would be overwritten; move it away",
                               file.string()));
}

fs::path CSVLogger::resumed_file(TrainerControl& trainer) const {
  return file_.empty() ? trainer.run_dir() / resumed_->get<std::string>("file") : file_;
}

State CSVLogger::state() const {
  if (resumed_) return *resumed_;
  State state;
  state.set("num_rows", num_rows_);
  state.set("file", file_.filename().string());
  if (num_rows_ == 0) return state;
  state.set_child("first_row", state_of(first_row_));
  state.set_child("last_row", state_of(row_));
  return state;
}

// The state may come from another user, with any path in it: only the name of the file is used, in the run's folder.
void CSVLogger::load_state(const State& state) {
  const auto saved = state.get<std::string>("file");
  if (saved.empty()) return resumed_.reset();  // there were no rows yet
  const std::string name = fs::path(saved).filename();
  if (name.empty() || name == "." || name == "..") {
    throw CheckpointError(fmt::format("the state of CSVLogger names '{}', which is no name of a file", saved));
  }
  if (const auto num_rows = state.get<int64_t>("num_rows"); num_rows < 0) {
    throw CheckpointError(fmt::format("the state of CSVLogger has num_rows = {}", num_rows));
  }
  resumed_ = state;
  resumed_->set("file", name);
  forget_file();
}

// Rows that were written after the checkpoint are cut off when the next row is written.
void CSVLogger::forget_file() {
  file_ = options_.file;
  columns_.clear();
  num_rows_ = 0;
  rows_begin_ = row_begin_ = end_ = 0;
}

// Chooses the file before the first row is written.
void CSVLogger::choose_file(TrainerControl& trainer) {
  const fs::path folder = file_.empty() ? trainer.run_dir() : fs::path();
  if (resumed_) {
    file_ = resumed_file(trainer);
    if (read_rows(*std::exchange(resumed_, std::nullopt))) return;
    if (folder.empty()) {
      throw SetupError(
          fmt::format("CSVLogger: '{}' has the rows of another run than the one that resumes; move it "
                      "away, or name another file",
                      file_.string()));
    }
  }
  if (!folder.empty()) file_ = next_numbered(folder, "metrics", ".csv");
}

// Keeps the first `num_rows` rows: a resumed run writes the later ones again. Returns false, and leaves the file alone,
// if its rows are not those that the checkpoint knows. A file that has lost its last rows is known by its first one.
bool CSVLogger::read_rows(const State& resumed) {
  const auto num_rows = resumed.get<int64_t>("num_rows");
  check_ours(file_);
  std::ifstream stream(file_, std::ios::binary);
  std::string line;
  if (!next_line(stream, line)) return true;
  const std::vector<std::string> names = split(line);
  columns_.assign(names.begin() + 2, names.end());
  rows_begin_ = end_ = line.size() + 1;
  while (num_rows_ < num_rows && next_line(stream, line)) {
    const std::vector<std::string> cells = split(line);
    if (cells.size() != names.size()) break;  // not written by a CSVLogger
    row_ = {.epoch = std::atoll(cells[0].c_str()), .step = std::atoll(cells[1].c_str()), .metrics = {}};
    for (size_t i = 2; i < cells.size(); ++i) {
      if (!cells[i].empty()) row_.metrics[names[i]] = std::strtod(cells[i].c_str(), nullptr);
    }
    row_begin_ = std::exchange(end_, end_ + line.size() + 1);
    if (++num_rows_ == 1) first_row_ = row_;
  }
  const bool is_ours = num_rows_ == num_rows ? has_values(row_, resumed.child("last_row"))
                                             : num_rows_ == 0 || has_values(first_row_, resumed.child("first_row"));
  if (!is_ours) {
    forget_file();
    return false;
  }
  starts_row_ = num_rows_ == 0;
  fs::resize_file(file_, end_);
  return true;
}

void CSVLogger::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  const bool is_in_run_dir = starts_row_ && options_.file.empty() && !file_.empty();
  if (is_in_run_dir && file_.parent_path() != trainer.run_dir()) forget_file();  // the file of an earlier Trainer
  if (num_rows_ == 0) choose_file(trainer);
  Metrics columns = metrics;
  int64_t epoch = trainer.state().epoch;
  if (const auto own_epoch = columns.extract("epoch")) epoch = static_cast<int64_t>(own_epoch.mapped());
  const bool same_row = !starts_row_ && num_rows_ > 0 && row_.epoch == epoch && row_.step == step;
  Row row = same_row ? row_ : Row{.epoch = epoch, .step = step, .metrics = {}};
  for (const auto& [name, value] : columns) row.metrics[name] = value;
  try {
    write(row, same_row);
  } catch (const std::exception& error) {
    if (num_rows_ == 0) throw;  // not a disk that is full by now, but a path that cannot be used
    warn_full_("CSVLogger: {}; training continues without the rows that cannot be written", error.what());
  }
}

// If writing fails, the file and the members stay as they were.
void CSVLogger::write(const Row& row, bool same_row) {
  const std::vector<std::string> all = columns_with(row.metrics);
  const int64_t num_rows_before = same_row ? num_rows_ - 1 : num_rows_;
  if (end_ > 0 && all == columns_) {
    write_row(row, same_row ? row_begin_ : end_);
  } else {
    rewrite(row, num_rows_before, all);
  }
  row_ = row;
  if (num_rows_before == 0) first_row_ = row;
  num_rows_ = num_rows_before + 1;
  starts_row_ = false;
}

std::vector<std::string> CSVLogger::columns_with(const Metrics& metrics) const {
  std::vector<std::string> columns = columns_;
  for (const auto& [name, value] : metrics) {
    const auto place = std::ranges::lower_bound(columns, name);
    if (std::ranges::count(columns, name) == 0) columns.insert(place, name);
  }
  return columns;
}

std::string CSVLogger::format(const Row& row, const std::vector<std::string>& columns) {
  std::string line = fmt::format("{},{}", row.epoch, row.step);
  for (const std::string& column : columns) {
    const auto metric = row.metrics.find(column);
    line += metric == row.metrics.end() ? "," : fmt::format(",{:.9g}", metric->second);
  }
  return line + "\n";
}

// The row as text, as the file has it.
State CSVLogger::state_of(const Row& row) {
  State state;
  state.set("epoch", std::to_string(row.epoch));
  state.set("step", std::to_string(row.step));
  for (const auto& [name, value] : row.metrics) state.set("metrics/" + name, fmt::format("{:.9g}", value));
  return state;
}

// Whether the row has the values that a checkpoint knows of it. It may have got further metrics after the checkpoint.
bool CSVLogger::has_values(const Row& row, const State& known) {
  const State now = state_of(row);
  return std::ranges::all_of(known.values(), [&](const auto& value) {
    const auto* found = now.find<std::string>(value.first);
    return found != nullptr && *found == known.get<std::string>(value.first);
  });
}

// Copies row by row, so that only one row is in memory.
void CSVLogger::rewrite(const Row& row, int64_t num_rows_before, const std::vector<std::string>& columns) {
  std::ifstream old(file_, std::ios::binary);
  old.seekg(static_cast<std::streamoff>(rows_begin_));
  const std::string header = header_of(columns);
  size_t written = 0, row_begin = 0;
  replace_file_atomically(file_, [&](FileWriter& file) {
    const auto write = [&](const std::string& text) {
      file.write(text.data(), text.size());
      row_begin = std::exchange(written, written + text.size());
    };
    write(header);
    std::string line;
    for (int64_t i = 0; i < num_rows_before; ++i) {
      if (!next_line(old, line)) throw_write_error(file_, std::make_error_code(std::errc::io_error));
      write(widened(line, columns_, columns));
    }
    write(format(row, columns));
  });
  columns_ = columns;
  rows_begin_ = header.size();
  row_begin_ = row_begin;
  end_ = written;
}

void CSVLogger::write_row(const Row& row, size_t begin) {
  const auto write_at = [&](size_t position, const std::string& text) {
    std::fstream stream(file_, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(position));
    stream << text << std::flush;
    return stream ? 0 : errno;
  };
  const std::string text = format(row, columns_);
  if (const int error = write_at(begin, text); error != 0) {
    if (begin < end_) write_at(begin, format(row_, columns_));  // the row that was there, and had its place
    std::error_code ignored;
    fs::resize_file(file_, end_, ignored);
    throw_write_error(file_, {error, std::generic_category()});
  }
  row_begin_ = begin;
  const size_t before = std::exchange(end_, begin + text.size());
  if (end_ < before) fs::resize_file(file_, end_);
}

}  // namespace fulgur
