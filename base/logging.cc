#include "fulgur/base/logging.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
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

void write_line(std::string_view level, std::string_view message) {
  const std::string line = fmt::format("{}{}{}\n", log_prefix(), level, message);
  BeforeLines& before = BeforeLines::instance();
  const std::lock_guard lock(before.mutex);
  for (const auto* call : before.calls) (*call)();
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void set_log_rank(int64_t rank, int64_t world_size) {
  g_rank = rank;
  g_world_size = world_size;
}

int64_t log_rank() { return g_rank; }

std::string log_prefix() { return g_world_size > 1 ? fmt::format("[rank {}] ", g_rank.load()) : ""; }

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
  if (g_rank == 0) write_line("", message);
}

void write_warning(std::string_view message) { write_line("warning: ", message); }

}  // namespace internal
}  // namespace fulgur
