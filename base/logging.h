#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace fulgur {

// Lines for people, on stderr: "[rank 1] warning: ...". The rank is shown only if there are several. A line is written
// in one call, so that lines of several threads or processes do not mix. On a terminal "warning:" and "error:" have a
// colour, unless the variable NO_COLOR is set (no-color.org).
void set_log_rank(int64_t rank, int64_t world_size);  // default: rank 0 of 1
int64_t log_rank();
std::string log_prefix();  // "[rank 1] "; empty if there is one rank

// Which lines are written: all, all but those of log_info, or errors alone. Default: info.
enum class LogLevel { info, warning, error };
void set_log_level(LogLevel level);

// From now on, every whole line that is logged, or written to std::cout or std::cerr, is also appended to the file at
// `path`. A line that is redrawn, such as a progress line, is appended in its last state. Output of C's stdio is not
// copied. An empty path ends the copying. Throws std::runtime_error if the file cannot be written.
void copy_output_to(const std::string& path);

// For the lifetime of the object, `call` runs before every log line: for an object that has an unfinished line on the
// terminal, so that the two do not mix. `call` may run on any thread, and must not log.
class ScopedBeforeLogLine {
 public:
  explicit ScopedBeforeLogLine(std::function<void()> call);
  ~ScopedBeforeLogLine();
  ScopedBeforeLogLine(const ScopedBeforeLogLine&) = delete;
  ScopedBeforeLogLine& operator=(const ScopedBeforeLogLine&) = delete;

 private:
  std::function<void()> call_;
};

namespace internal {
void write_info(std::string_view message);  // dropped on ranks above 0
void write_warning(std::string_view message);
void write_error(std::string_view prefix, std::string_view message);  // "<prefix>error: <message>", at every level
}  // namespace internal

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  internal::write_info(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  internal::write_warning(fmt::format(format, std::forward<Args>(args)...));
}

// A warning that is logged at its first call only.
class WarnOnce {
 public:
  template <class... Args>
  void operator()(fmt::format_string<Args...> format, Args&&... args) {
    if (!std::exchange(has_warned_, true)) log_warning(format, std::forward<Args>(args)...);
  }
  bool has_warned() const { return has_warned_; }

 private:
  bool has_warned_ = false;
};

}  // namespace fulgur
