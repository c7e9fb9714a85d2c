#include "fulgur/base/logging.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <streambuf>
#include <utility>
#include <vector>

namespace fulgur {
namespace {

std::atomic<int64_t> g_rank{0};
std::atomic<int64_t> g_world_size{1};

// The functions to call before each line.
struct BeforeLines {
  std::mutex mutex{};
  std::vector<const std::function<void()>*> calls{};

  static BeforeLines& instance() {
    static auto* const never_destroyed = new BeforeLines;
    return *never_destroyed;
  }
};

std::atomic<LogLevel> g_level{LogLevel::info};

// The file that copies the output. Never destroyed: threads may log until the process has ended.
struct OutputFile {
  std::mutex mutex{};
  std::ofstream file{};

  static OutputFile& instance() {
    static auto* const never_destroyed = new OutputFile;
    return *never_destroyed;
  }
  void append(std::string_view line) {
    const std::lock_guard lock(mutex);
    if (file.is_open()) file << line << std::flush;
  }
};

// Replaces the buffer of a stream: passes all text on to the original buffer, and appends whole lines to the file.
class CopyingBuffer final : public std::streambuf {
 public:
  explicit CopyingBuffer(std::ostream& stream) : stream_(stream), original_(stream.rdbuf(this)) {}
  ~CopyingBuffer() override { stream_.rdbuf(original_); }

 protected:
  int_type overflow(int_type c) override {
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    const char character = traits_type::to_char_type(c);
    return xsputn(&character, 1) == 1 ? c : traits_type::eof();
  }
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    for (const char character : std::string_view(text, static_cast<size_t>(size))) take(character);
    return original_->sputn(text, size);
  }
  int sync() override { return original_->pubsync(); }

 private:
  void take(char character) {
    const std::lock_guard lock(mutex_);
    if (character == '\r') {
      is_redrawn_ = true;
      return;
    }
    if (is_redrawn_ && character != '\n') line_.clear();
    is_redrawn_ = false;
    line_ += character;
    if (character != '\n') return;
    OutputFile::instance().append(line_);
    line_.clear();
  }

  std::ostream& stream_;
  std::streambuf* original_;
  std::mutex mutex_{};  // several threads may write
  std::string line_{};  // the unfinished line
  bool is_redrawn_ = false;
};

std::string in_colour(std::string_view text, int colour) {
  const char* terminal = std::getenv("TERM");
  const char* no_colour = std::getenv("NO_COLOR");
  const bool is_plain = isatty(STDERR_FILENO) == 0 || (no_colour != nullptr && *no_colour != '\0') ||
                        terminal == nullptr || std::string_view(terminal) == "dumb";
  return is_plain ? std::string(text) : fmt::format("\x1b[1;{}m{}\x1b[0m", colour, text);
}

constexpr int kRed = 31, kYellow = 33;

void write_line(std::string_view prefix, std::string_view level, int colour, std::string_view message) {
  const std::string label = level.empty() ? "" : in_colour(level, colour) + " ";
  const std::string line = fmt::format("{}{}{}\n", prefix, label, message);
  BeforeLines& before = BeforeLines::instance();
  const std::lock_guard lock(before.mutex);
  for (const auto* call : before.calls) (*call)();
  std::fwrite(line.data(), 1, line.size(), stderr);
  OutputFile::instance().append(fmt::format("{}{}{}{}\n", prefix, level, level.empty() ? "" : " ", message));
}

}  // namespace

void set_log_rank(int64_t rank, int64_t world_size) {
  g_rank = rank;
  g_world_size = world_size;
}

int64_t log_rank() { return g_rank; }

std::string log_prefix() { return g_world_size > 1 ? fmt::format("[rank {}] ", g_rank.load()) : ""; }

void set_log_level(LogLevel level) { g_level = level; }

void copy_output_to(const std::string& path) {
  static std::optional<CopyingBuffer> out, err;
  out.reset();
  err.reset();
  OutputFile& output = OutputFile::instance();
  {
    const std::lock_guard lock(output.mutex);
    output.file = {};
    if (path.empty()) return;
    output.file.open(path, std::ios::app);
    if (!output.file) throw std::runtime_error(fmt::format("'{}' cannot be written", path));
  }
  out.emplace(std::cout);
  err.emplace(std::cerr);
}

ScopedBeforeLogLine::ScopedBeforeLogLine(std::function<void()> call) : call_(std::move(call)) {
  BeforeLines& before = BeforeLines::instance();
  const std::lock_guard lock(before.mutex);
  before.calls.push_back(&call_);
}

ScopedBeforeLogLine::~ScopedBeforeLogLine() {
  BeforeLines& before = BeforeLines::instance();
  const std::lock_guard lock(before.mutex);
  std::erase(before.calls, &call_);
}

namespace internal {

void write_info(std::string_view message) {
  if (g_rank == 0 && g_level == LogLevel::info) write_line(log_prefix(), "", 0, message);
}

void write_warning(std::string_view message) {
  if (g_level != LogLevel::error) write_line(log_prefix(), "warning:", kYellow, message);
}

void write_error(std::string_view prefix, std::string_view message) { write_line(prefix, "error:", kRed, message); }

}  // namespace internal
}  // namespace fulgur
