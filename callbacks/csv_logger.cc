#include "callbacks/csv_logger.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace fulgur {
namespace {

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
    if (c == '"') {  // two of them are one: the second opens again
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

void write(const std::filesystem::path& file, std::ios::openmode mode, const std::string& text) {
  std::ofstream stream(file, mode | std::ios::binary);
  stream << text << std::flush;
  if (!stream) {
    throw std::runtime_error(
        fmt::format("cannot write '{}': {}", file.string(), std::generic_category().message(errno)));
  }
}

}  // namespace

CSVLogger::CSVLogger(Options options) : options_(std::move(options)) {}

std::shared_ptr<CSVLogger> CSVLogger::make(Options options) { return std::make_shared<CSVLogger>(std::move(options)); }

void CSVLogger::setup(TrainerControl&, EntryPoint entry_point) {
  starts_row_ = true;
  if (entry_point != EntryPoint::fit) check_new();  // fit may go on in it
}

void CSVLogger::on_fit_start(TrainerControl&) {
  if (!resumed_rows_) check_new();
}

void CSVLogger::check_new() const {
  if (!rows_.empty() || options_.file.empty()) return;
  if (std::filesystem::exists(options_.file)) {
    throw SetupError(fmt::format("CSVLogger: '{}' exists and would be overwritten; move it away, or name another file",
                                 options_.file.string()));
  }
  if (options_.file.has_parent_path()) std::filesystem::create_directories(options_.file.parent_path());
}

State CSVLogger::state() const {
  State state;
  state.set("num_rows", static_cast<int64_t>(rows_.size()));
  state.set("file", options_.file.filename().string());
  return state;
}

void CSVLogger::load_state(const State& state) {
  if (!rows_.empty()) return;
  resumed_rows_ = static_cast<size_t>(state.get<int64_t>("num_rows"));
  resumed_name_ = state.get<std::string>("file");
}

// Before the first row.
void CSVLogger::choose_file(TrainerControl& trainer) {
  const std::filesystem::path folder = options_.file.empty() ? trainer.run_dir() : std::filesystem::path();
  if (options_.file.empty()) options_.file = folder / (resumed_name_.empty() ? "metrics.csv" : resumed_name_);
  if (const auto num_rows = std::exchange(resumed_rows_, std::nullopt)) return read_rows(*num_rows);
  for (int version = 1; !folder.empty() && std::filesystem::exists(options_.file); ++version) {
    options_.file = folder / fmt::format("metrics-v{}.csv", version);
  }
}

// What a run wrote after it was saved comes again.
void CSVLogger::read_rows(size_t num_rows) {
  std::ifstream stream(options_.file);
  std::string line;
  if (!std::getline(stream, line)) return;
  const std::vector<std::string> names = split(line);
  while (rows_.size() < num_rows && std::getline(stream, line)) {
    const std::vector<std::string> cells = split(line);
    if (cells.size() != names.size() || cells.size() < 2) break;  // not ours
    Row row{std::atoll(cells[0].c_str()), std::atoll(cells[1].c_str()), {}};
    for (size_t i = 2; i < cells.size(); ++i) {
      if (!cells[i].empty()) row.metrics[names[i]] = std::strtod(cells[i].c_str(), nullptr);
    }
    add_columns(row.metrics);
    rows_.push_back(std::move(row));
  }
  starts_row_ = rows_.empty();
  write_all();
}

void CSVLogger::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  if (rows_.empty()) choose_file(trainer);
  Metrics columns = metrics;
  int64_t epoch = trainer.state().epoch;
  if (const auto own_epoch = columns.extract("epoch")) epoch = static_cast<int64_t>(own_epoch.mapped());
  const bool same_row =
      !std::exchange(starts_row_, false) && !rows_.empty() && rows_.back().epoch == epoch && rows_.back().step == step;
  if (!same_row) rows_.push_back({epoch, step, {}});
  for (const auto& [name, value] : columns) rows_.back().metrics[name] = value;
  const bool new_columns = add_columns(columns);
  const bool rewrite = new_columns || same_row;
  rewrite ? write_all() : append(rows_.back());
}

bool CSVLogger::add_columns(const Metrics& metrics) {
  const size_t before = columns_.size();
  for (const auto& [name, value] : metrics) {
    const auto place = std::ranges::lower_bound(columns_, name);
    if (place == columns_.end() || *place != name) columns_.insert(place, name);
  }
  return columns_.size() != before;
}

std::string CSVLogger::format(const Row& row) const {
  std::string line = fmt::format("{},{}", row.epoch, row.step);
  for (const std::string& column : columns_) {
    const auto metric = row.metrics.find(column);
    line += metric == row.metrics.end() ? "," : fmt::format(",{:.9g}", metric->second);
  }
  return line + "\n";
}

void CSVLogger::write_all() const {
  std::string text = "epoch,step";
  for (const std::string& column : columns_) text += "," + csv_cell(column);
  text += "\n";
  for (const Row& row : rows_) text += format(row);
  write(options_.file, std::ios::trunc, text);
}

void CSVLogger::append(const Row& row) const { write(options_.file, std::ios::app, format(row)); }

}  // namespace fulgur
