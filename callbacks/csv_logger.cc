#include "callbacks/csv_logger.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
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

void CSVLogger::setup(TrainerControl&, EntryPoint) {
  starts_row_ = true;
  if (!rows_.empty() || options_.file.empty()) return;
  if (std::filesystem::exists(options_.file)) {
    throw SetupError(fmt::format("CSVLogger: '{}' exists and would be overwritten; move it away, or name another file",
                                 options_.file.string()));
  }
  if (options_.file.has_parent_path()) std::filesystem::create_directories(options_.file.parent_path());
}

void CSVLogger::on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) {
  if (options_.file.empty()) options_.file = trainer.run_dir() / "metrics.csv";
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
