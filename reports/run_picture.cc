#include "fulgur/reports/run_picture.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <ctime>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fulgur/base/host_name.h"
#include "fulgur/checkpoint/numbered_files.h"
#include "fulgur/reports/terminal_text.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

using Clock = std::chrono::system_clock;
using Lines = std::vector<std::string>;

constexpr size_t kNarrow = 50;      // columns; below, a metric takes two lines
constexpr size_t kValueWidth = 12;  // -1.23457e-05
constexpr size_t kMostNameWidth = 30;
constexpr double kSilent_s = 600;     // a run that wrote nothing for longer shows no sign of life
constexpr double kClockError_s = 60;  // by which the time in env.json and the kernel's may differ
constexpr std::array<std::string_view, 8> kBlocks{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

// Joins parts with two spaces, in lines of at most `width` columns.
Lines flow(const Lines& parts, size_t width) {
  Lines lines;
  for (const std::string& part : parts) {
    if (!lines.empty() && columns_of(lines.back()) + 2 + columns_of(part) <= width) {
      lines.back() += "  " + part;
    } else {
      lines.push_back(terminal_text(part, width));
    }
  }
  return lines;
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::clamp(seconds, 0.0, 1e9));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, whole % 60)
                   : fmt::format("{}:{:02}", minutes, whole % 60);
}

std::optional<int64_t> number_in(const RunFolder& run, std::string_view name) {
  const std::string* text = run.find_environment(name);
  int64_t number = 0;
  if (text == nullptr) return std::nullopt;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  return error == std::errc() && end == text->data() + text->size() ? std::optional(number) : std::nullopt;
}

// Seconds since 1970, which a Clock::time_point cannot hold for every year that env.json may name.
std::optional<double> start_of(const RunFolder& run) {
  const std::string* text = run.find_environment("started");
  std::tm time{};
  if (text == nullptr || strptime(text->c_str(), "%Y-%m-%dT%H:%M:%SZ", &time) == nullptr) return std::nullopt;
  return double(timegm(&time));
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// What /proc says of a process.
struct ProcessStatus {
  char state = '?';      // 'Z': it has ended, and its parent does not know yet
  double start_s = 0.0;  // seconds since 1970
};
std::optional<ProcessStatus> status_of(pid_t process) {
  double boot_s = 0.0;
  std::ifstream system("/proc/stat");
  for (std::string line; boot_s == 0.0 && std::getline(system, line);) {
    if (line.starts_with("btime ")) boot_s = std::atof(line.c_str() + std::string_view("btime ").size());
  }
  std::string text;
  std::getline(std::ifstream(fmt::format("/proc/{}/stat", process)), text);
  const size_t name_end = text.rfind(')');  // the name before it may hold anything
  if (boot_s == 0.0 || name_end == text.npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  constexpr int kNumBetween = 18;  // fields from the state to the time of the start, see proc(5)
  ProcessStatus status;
  std::string field;
  double start_ticks = 0.0;
  fields >> status.state;
  for (int i = 0; i < kNumBetween; ++i) fields >> field;
  if (!(fields >> start_ticks)) return std::nullopt;
  status.start_s = boot_s + start_ticks / double(sysconf(_SC_CLK_TCK));
  return status;
}

// Whether the process of env.json runs on this host; nullopt if it ran on another one. A container may have the name of
// its host, but neither its process ids nor its folders.
std::optional<bool> is_running(const RunFolder& run) {
  const auto process = number_in(run, "process");
  const std::string *host = run.find_environment("host"), *folder = run.find_environment("folder");
  std::error_code error;
  if (!process || *process < 1 || *process > std::numeric_limits<pid_t>::max()) return std::nullopt;
  if (host == nullptr || *host != host_name()) return std::nullopt;
  if (folder != nullptr && !fs::exists(*folder, error)) return std::nullopt;
  const auto id = static_cast<pid_t>(*process);
  if (kill(id, 0) != 0 && errno == ESRCH) return false;
  const auto status = status_of(id);
  const auto start = start_of(run);
  if (!status) return true;
  const bool is_another = start && status->start_s > *start + kClockError_s;
  return status->state != 'Z' && status->state != 'X' && !is_another;
}

// nullopt if there is no such file.
std::optional<Clock::time_point> time_of(const fs::path& file) {
  std::error_code error;
  const auto time = fs::last_write_time(file, error);
  return error ? std::nullopt : std::optional(std::chrono::file_clock::to_sys(time));
}

bool is_silent(const RunLife& life) {
  return life.state == RunLife::State::unknown && life.silent_s.value_or(0.0) > kSilent_s;
}

void add_progress(Lines& lines, const RunFolder& run, const RunProgress& progress, size_t width) {
  if (progress.num_steps_in_all && *progress.num_steps_in_all > 0) {
    const double done = std::clamp(double(progress.num_steps) / double(*progress.num_steps_in_all), 0.0, 1.0);
    const size_t length = std::min<size_t>(width, 60) - std::min<size_t>(width, 7);
    const auto filled = static_cast<size_t>(std::floor(done * double(length)));
    lines.push_back(terminal_text(fmt::format("[{}{}] {:.0f}%", std::string(filled, '#'),
                                              std::string(length - filled, '.'), std::floor(done * 100)),
                                  width));
  }
  Lines parts;
  const std::string in_all = progress.num_steps_in_all ? fmt::format(" of {}", *progress.num_steps_in_all) : "";
  if (progress.idle_s) parts.push_back(fmt::format("step {}{}", progress.num_steps, in_all));
  if (progress.idle_s) parts.push_back(fmt::format("epoch {}", run.metrics.last_epoch));
  if (progress.steps_per_s) parts.push_back(fmt::format("{:.3g} steps/s", *progress.steps_per_s));
  const RunLife& life = progress.life;
  if (life.state == RunLife::State::ended) {
    parts.push_back("ended");
  } else if (is_silent(life)) {
    parts.push_back(fmt::format("no sign of life for {}", duration(*life.silent_s)));
  } else if (progress.left_s) {
    parts.push_back(fmt::format("{} left", duration(*progress.left_s)));
  }
  if (progress.idle_s) parts.push_back(fmt::format("logged {} ago", duration(*progress.idle_s)));
  for (std::string& line : flow(parts, width)) lines.push_back(std::move(line));
  if (life.state == RunLife::State::ended && !life.post_mortem.empty()) {
    lines.push_back(terminal_text("an exception ended it; see " + life.post_mortem.string(), width));
  }
}

std::vector<const MetricCurve*> curves_by_kind(const MetricTable& metrics) {
  std::vector<const MetricCurve*> curves;
  for (const MetricCurve& curve : metrics.curves) {
    if (!curve.points.empty()) curves.push_back(&curve);
  }
  std::ranges::stable_sort(curves, {}, [](const MetricCurve* curve) { return kind_of_metric(curve->name); });
  return curves;
}

void add_metrics(Lines& lines, const MetricTable& metrics, size_t width) {
  const auto curves = curves_by_kind(metrics);
  size_t name_width = 0;
  for (const MetricCurve* curve : curves) name_width = std::max(name_width, columns_of(curve->name));
  name_width = std::min(name_width, kMostNameWidth);
  for (const MetricCurve* curve : curves) {
    std::string line;
    if (width < kNarrow) {
      lines.push_back(terminal_text(curve->name, width));
    } else {
      line = padded(curve->name, name_width) + "  ";
    }
    line += fmt::format("{:<{}.6g} ", curve->points.back().value, kValueWidth);
    const size_t used = columns_of(line);
    if (used < width) line += sparkline(curve->points, width - used);
    lines.push_back(terminal_text(line, width));
  }
}

}  // namespace

RunLife life_of(const RunFolder& run, Clock::time_point now) {
  const fs::path folder(run.name);
  const auto begin = time_of(last_numbered(folder, "env", ".json")), log = time_of(folder / "log.txt");
  const auto logged = run.metrics_file.empty() ? std::nullopt : std::optional(run.metrics_time);
  const auto last = std::max({begin, log, logged});
  const auto is_later = [&](const fs::path& file) { return time_of(file) >= std::max(begin, logged); };
  RunLife life;
  if (last) life.silent_s = std::max(0.0, seconds(now - *last));
  const fs::path post_mortem = last_numbered(folder, "post_mortem", "");
  if (!post_mortem.empty() && is_later(post_mortem)) life.post_mortem = post_mortem;
  const auto runs_here = is_running(run);
  const auto num_steps = number_in(run, "estimated_stepping_batches");
  const bool is_complete = num_steps && *num_steps > 0 && run.metrics.last_step >= *num_steps - 1;
  const bool has_page = time_of(folder / "report.html") && is_later(folder / "report.html");
  const bool has_ended = runs_here ? !*runs_here : !life.post_mortem.empty() || (is_complete && has_page);
  if (runs_here || has_ended) life.state = has_ended ? RunLife::State::ended : RunLife::State::in_progress;
  return life;
}

RunProgress progress_of(const RunFolder& run, Clock::time_point now) {
  RunProgress progress;
  progress.num_steps_in_all = number_in(run, "estimated_stepping_batches");
  if (run.metrics.num_rows == 0) return progress;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  progress.num_steps = run.metrics.last_step < kMost ? run.metrics.last_step + 1 : kMost;
  progress.idle_s = std::max(0.0, seconds(now - run.metrics_time));
  const auto first_step = number_in(run, "first_step");
  const auto start = start_of(run);
  const double passed_s = start ? seconds(run.metrics_time.time_since_epoch()) - *start : 0.0;
  if (!first_step || passed_s <= 0 || progress.num_steps <= *first_step) return progress;
  progress.steps_per_s = (double(progress.num_steps) - double(*first_step)) / passed_s;
  if (progress.num_steps_in_all) {
    const double num_left = double(*progress.num_steps_in_all) - double(progress.num_steps);
    progress.left_s = std::max(0.0, num_left) / *progress.steps_per_s;
  }
  return progress;
}

std::string sparkline(std::span<const MetricPoint> points, size_t width) {
  const size_t num_parts = std::min(width, points.size());
  std::vector<double> means;
  for (size_t part = 0; part < num_parts; ++part) {
    double sum = 0;
    size_t count = 0;
    for (size_t i = part * points.size() / num_parts; i < (part + 1) * points.size() / num_parts; ++i) {
      if (!std::isfinite(points[i].value)) continue;
      sum += points[i].value;
      ++count;
    }
    means.push_back(count == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / double(count));
  }
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double mean : means) {
    if (!std::isfinite(mean)) continue;
    low = std::min(low, mean);
    high = std::max(high, mean);
  }
  std::string line;
  for (const double mean : means) {
    const double height = high > low ? (mean / 2 - low / 2) / (high / 2 - low / 2) : 0.0;
    const auto block = static_cast<size_t>(std::lround(std::isfinite(height) ? height * (kBlocks.size() - 1) : 0));
    line += std::isfinite(mean) ? kBlocks[block] : "x";
  }
  return line;
}

std::string run_picture(const RunFolder& run, const RunProgress& progress, PictureOptions options) {
  const size_t width = std::max<size_t>(options.width, 1);
  Lines lines{terminal_text(run.name, width)};
  add_progress(lines, run, progress, width);
  for (const std::string& note : run.notes) lines.push_back(terminal_text(note, width));
  if (!run.last_output.empty()) lines.push_back(terminal_text("> " + run.last_output, width));
  add_metrics(lines, run.metrics, width);
  if (options.height > 0 && lines.size() > options.height) lines.resize(options.height);
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

}  // namespace fulgur
