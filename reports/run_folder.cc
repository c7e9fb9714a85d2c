#include "fulgur/reports/run_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <variant>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/base/toml_file.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/flat_json.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/limits.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/numbered_files.h"
#include "fulgur/reports/terminal_text.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kEnvironmentBytes = 1 << 20;
constexpr int kEnvironmentDepth = 16;  // what is nested deeper would recurse too far
constexpr int64_t kProfileBytes = 1 << 20;
constexpr std::streamoff kLastOutputBytes = 4096;  // a longer last line loses its beginning
constexpr const char* kNoMetrics = "there is no metrics.csv: none is written yet, or CSVLogger's file is elsewhere";
constexpr size_t kMostNames = 10;  // a message lists no more

std::vector<std::string> folders_in(const fs::path& parent) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent.empty() ? "." : parent, error)) {
    if (entry.is_directory(error)) names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

// A sentence about the folders in `parent`, to end a message.
std::string what_is_in(const fs::path& parent) {
  std::vector<std::string> names = folders_in(parent);
  const std::string where = parent.empty() ? "." : terminal_text(parent.string());
  if (names.empty()) return fmt::format("'{}' has no folders", where);
  const bool is_cut = names.size() > kMostNames;
  names.resize(std::min(names.size(), kMostNames));
  for (std::string& name : names) name = terminal_text(name);
  return fmt::format("'{}' has {}{}", where, fmt::join(names, ", "), is_cut ? ", ..." : "");
}

// "runs/a" for "runs/a/".
fs::path without_slash(const fs::path& folder) {
  return folder.has_filename() || !folder.has_relative_path() ? folder : folder.parent_path();
}

void require_folder(const fs::path& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return;
  if (fs::exists(folder, error)) {
    throw UsageError(
        fmt::format("'{}' is no folder; give the folder of a run, such as runs/version_0", folder.string()));
  }
  const fs::path parent = folder.parent_path();
  const auto nearest = nearest_name(folder.filename().string(), folders_in(parent));
  throw UsageError(
      fmt::format("there is no folder '{}';{} {}", folder.string(),
                  nearest ? fmt::format(" did you mean '{}'?", terminal_text((parent / *nearest).string())) : "",
                  fs::is_directory(parent.empty() ? "." : parent, error)
                      ? what_is_in(parent)
                      : fmt::format("there is no folder '{}' either", parent.string())));
}

std::string text_of(const nlohmann::ordered_json& value) {
  if (value.is_null()) return "";
  return value.is_string() ? value.get<std::string>()
                           : value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// A name that numbered_files.h may have made: "metrics" and 2 for "metrics-v2", "metrics" and 0 for "metrics".
std::pair<std::string, int> parse_numbered(const std::string& stem) {
  const size_t mark = stem.rfind("-v");
  if (mark == stem.npos) return {stem, 0};
  int number = 0;
  const char* const end = stem.data() + stem.size();
  const auto [parsed, error] = std::from_chars(stem.data() + mark + 2, end, number);
  if (error != std::errc() || parsed != end || number < 1) return {stem, 0};
  return {stem.substr(0, mark), number};
}

struct MetricsFile {
  fs::path path;
  int number = 0;  // 0 of metrics.csv, 1 of metrics-v1.csv
  fs::file_time_type time{};
};

// The metrics files in the folder, by the time of the last write, the latest first.
std::vector<MetricsFile> metrics_files_in(const fs::path& folder) {
  std::vector<MetricsFile> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto [stem, number] = parse_numbered(entry.path().stem().string());
    if (stem != "metrics" || entry.path().extension() != ".csv") continue;
    files.push_back({.path = entry.path(), .number = number, .time = entry.last_write_time(error)});
  }
  std::ranges::sort(files, std::greater(), [](const auto& file) { return std::pair(file.time, file.number); });
  return files;
}

// Metrics that only training writes: those of LearningRateMonitor, GradientNormMonitor and ThroughputMonitor, and what
// a Module calls train_loss.
bool is_of_training(const MetricCurve& curve) {
  const bool has_name_of_training =
      curve.name.starts_with("train") || kind_of_metric(curve.name) == MetricKind::optimization;
  return has_name_of_training && !curve.points.empty();
}

// False for the rows of a Trainer that has only validated or tested, which ends at step 0 of epoch 0. A fit of one step
// ends there too, and is known by its metrics.
bool has_training_rows(const MetricTable& table) {
  return table.last_step > 0 || table.last_epoch > 0 || std::ranges::any_of(table.curves, is_of_training);
}

// What a metrics file without rows of training has, which is not shown: "metrics-v1.csv was written later and ...".
std::string summary_of(const MetricsFile& file, const MetricTable& table) {
  std::vector<std::string> values;
  for (const MetricCurve& curve : table.curves) {
    if (!curve.points.empty()) values.push_back(fmt::format("{} {:.9g}", curve.name, curve.points.back().value));
  }
  const bool is_cut = values.size() > kMostNames;
  values.resize(std::min(values.size(), kMostNames));
  return fmt::format("{} was written later and {}{}{}", file.path.filename().string(),
                     values.empty() ? "has no rows yet" : "ends at step 0, as an evaluation does: ",
                     fmt::join(values, ", "), is_cut ? ", ..." : "");
}

// A damaged manifest may name any sizes.
int64_t saturating_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;  // both are at least 0
}

class FolderReader {
 public:
  explicit FolderReader(const fs::path& folder) : folder_(folder), run_{.name = folder.string()} {}

  void read_metrics() {
    GrowingMetricFile file("");
    read_metrics(file, {});
  }

  // `before` has the metrics that were read from `file` before. `file` becomes the metrics file that is shown.
  void read_metrics(GrowingMetricFile& file, MetricTable before) {
    const std::vector<MetricsFile> files = metrics_files_in(folder_);
    if (files.empty()) return note(kNoMetrics);
    std::vector<std::pair<GrowingMetricFile, MetricTable>> read;  // up to the first one with rows of training
    for (const MetricsFile& each : files) {
      const bool is_known = each.path == file.path();
      auto& [content, table] = read.emplace_back(is_known ? file : GrowingMetricFile(each.path), MetricTable());
      table = content.read(is_known ? std::move(before) : MetricTable());
      if (has_training_rows(table)) break;
    }
    const size_t shown = has_training_rows(read.back().second) ? read.size() - 1 : 0;
    run_.metrics_file = files[shown].path;
    run_.metrics_time = std::chrono::file_clock::to_sys(files[shown].time);
    std::tie(file, run_.metrics) = std::move(read[shown]);
    const std::string name = run_.metrics_file.filename().string();
    if (files.size() > 1 && shown == 0) {
      note(fmt::format("{} is shown, which the newest run in this folder has written", name));
    } else if (shown > 0) {
      note(fmt::format("{} is shown; {}", name, summary_of(files[0], read[0].second)));
    }
    if (run_.metrics.has_torn_row) note(fmt::format("the last row of {} is incomplete, and is left out", name));
    if (run_.metrics.num_rows == 0) note(fmt::format("{} has no rows yet", name));
  }

  void read_config() {
    const fs::path file = last_numbered(folder_, "config", ".toml");
    if (file.empty()) return;
    std::vector<std::string> problems;
    run_.config = read_toml_values(file, problems);
    for (const std::string& problem : problems) note(problem);
  }

  void read_environment() {
    const fs::path file = last_numbered(folder_, "env", ".json");
    if (file.empty()) return;
    try {
      const std::string text = read_text_file(file, kEnvironmentBytes);
      parse_json(text, file.filename().string(), {.max_depth = kEnvironmentDepth});  // throws if it is nested deeper
      const auto json = nlohmann::ordered_json::parse(text);
      for (const auto& [name, value] : json.items()) run_.environment.emplace_back(name, text_of(value));
    } catch (const std::exception& error) {
      note(error.what());
    }
  }

  void read_checkpoints() {
    const fs::path folder = folder_ / "checkpoints";
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const bool is_being_saved = is_temporary_name(entry.path().filename().string());
      if (!entry.is_symlink(error) && !is_being_saved && is_checkpoint(entry.path())) read_checkpoint(entry.path());
    }
    std::ranges::sort(run_.checkpoints, {}, [](const auto& each) { return std::pair(each.step, each.name); });
    for (CheckpointSummary& checkpoint : run_.checkpoints) {
      checkpoint.is_best = is_link_to(folder / "best", checkpoint.name);
      checkpoint.is_last = is_link_to(folder / "last", checkpoint.name);
      const auto score = scores_.find(checkpoint.name);
      if (score == scores_.end()) continue;
      checkpoint.monitor = score->second.monitor;
      checkpoint.score = score->second.value;
    }
  }

  // profile-fit.txt is that of profiler = "simple", trace-rank0.txt that of KinetoProfiler. The newest of each is read.
  void read_profiles() {
    std::map<std::string, std::pair<int, fs::path>> newest;  // by the stem without a number
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder_, error)) {
      const auto [stem, number] = parse_numbered(entry.path().stem().string());
      if (entry.path().extension() != ".txt") continue;
      if (!stem.starts_with("profile-") && !stem.starts_with("trace-rank")) continue;
      auto& last = newest[stem];
      last = std::max(last, {number, entry.path()});
    }
    for (const auto& [stem, last] : newest) {
      try {
        run_.profiles.emplace_back(last.second.filename().string(), read_text_file(last.second, kProfileBytes));
      } catch (const CheckpointError& refused) {
        note(refused.what());
      }
    }
  }

  void read_last_output() {
    std::ifstream log(folder_ / "log.txt", std::ios::binary | std::ios::ate);
    const auto begin = std::max<std::streamoff>(0, log.tellg() - kLastOutputBytes);
    log.seekg(begin);
    for (std::string line; std::getline(log, line);) {
      if (!line.empty()) run_.last_output = line;
    }
  }

  // A file of a run counts even if nothing could be read from it: a note says why.
  RunFolder take() {
    const bool has_read =
        !run_.metrics_file.empty() || !run_.config.empty() || !run_.environment.empty() || !run_.checkpoints.empty();
    if (!has_read && !is_run_folder(folder_)) {
      throw UsageError(
          fmt::format("'{}' is no folder of a run: it has no metrics.csv, config.toml, env.json or "
                      "checkpoints; {}",
                      run_.name, what_is_in(folder_)));
    }
    return std::move(run_);
  }

 private:
  struct Score {
    std::string monitor;
    double value = 0.0;
    int64_t step = 0;  // when the checkpoint that says so was written
  };

  void note(std::string sentence) { run_.notes.push_back(std::move(sentence)); }

  // A run in progress may remove a checkpoint while it is read.
  void read_checkpoint(const fs::path& folder) try {
    CheckpointSummary summary{.name = folder.filename().string()};
    for (const auto& file : read_manifest(folder).files) {
      summary.num_bytes = saturating_sum(summary.num_bytes, file.num_bytes);
    }
    const FlatValues state = parse_flat_json(read_text_file(folder / "state.json", limits::kRunStateBytes),
                                             (folder / "state.json").string());
    const auto step = state.find("loops/global_step");
    if (step != state.end() && std::holds_alternative<int64_t>(step->second))
      summary.step = std::get<int64_t>(step->second);
    read_scores(state, summary.step.value_or(0));
    run_.checkpoints.push_back(summary);
  } catch (const CheckpointError& error) {
    if (fs::exists(folder)) note(error.what());
  }

  // The state of each ModelCheckpoint has <its name>/saved/<i>/name and score, and <its name>/monitor. If several
  // checkpoints have a score of the same one, the score in the newest counts.
  void read_scores(const FlatValues& state, int64_t step) {
    const auto value_of = [&]<class T>(const std::string& name, T fallback) {
      const auto found = state.find(name);
      const T* value = found == state.end() ? nullptr : std::get_if<T>(&found->second);
      return value == nullptr ? fallback : *value;
    };
    for (const auto& [key, value] : state) {
      const size_t saved = key.rfind("/saved/");
      if (saved == key.npos || !key.ends_with("/name") || !std::holds_alternative<std::string>(value)) continue;
      const std::string entry = key.substr(0, key.size() - std::string_view("/name").size());
      const std::string monitor = value_of(key.substr(0, saved) + "/monitor", std::string());
      if (monitor.empty()) continue;
      Score& score = scores_[std::get<std::string>(value)];
      if (step < score.step) continue;
      score = {.monitor = monitor, .value = value_of(entry + "/score", 0.0), .step = step};
    }
  }

  static bool is_link_to(const fs::path& link, const std::string& name) {
    std::error_code error;
    return fs::read_symlink(link, error).filename() == name;
  }

  const fs::path& folder_;
  RunFolder run_;
  std::map<std::string, Score> scores_{};  // by the checkpoint's name
};

}  // namespace

const std::string* RunFolder::find_environment(std::string_view key) const {
  const auto found =
      std::ranges::find(environment, key, [](const auto& entry) { return std::string_view(entry.first); });
  return found == environment.end() ? nullptr : &found->second;
}

bool is_run_folder(const fs::path& folder) {
  std::error_code error;
  return std::ranges::any_of(
      std::initializer_list<const char*>{"metrics.csv", "config.toml", "env.json", "checkpoints"},
      [&](const char* name) { return fs::exists(folder / name, error); });
}

RunFolder read_run_folder(const fs::path& asked) {
  const fs::path folder = without_slash(asked);
  require_folder(folder);
  FolderReader reader(folder);
  reader.read_metrics();
  reader.read_config();
  reader.read_environment();
  reader.read_checkpoints();
  reader.read_profiles();
  return reader.take();
}

ProgressReader::ProgressReader(fs::path folder) : folder_(without_slash(folder)) {}

const RunFolder& ProgressReader::read() {
  require_folder(folder_);
  FolderReader reader(folder_);
  reader.read_metrics(metrics_, std::move(run_.metrics));
  reader.read_environment();
  reader.read_last_output();
  run_ = reader.take();
  return run_;
}

}  // namespace fulgur
