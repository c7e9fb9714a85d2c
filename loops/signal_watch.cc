#include "fulgur/loops/signal_watch.h"

#include <fmt/format.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <ranges>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

std::atomic<int> noted_signal = 0;  // reset when the first watch is made
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

extern "C" void note_signal(int number) { noted_signal = number; }

// The signal handlers of the process, which all watches share.
class Handlers {
 public:
  void add_watch() {
    const std::lock_guard lock(mutex_);
    if (num_watches_++ > 0) return;
    noted_signal = 0;
    install(SIGTERM);
    install(SIGINT);
    if (std::getenv("SLURM_JOB_ID") != nullptr) install(SIGUSR1);
  }
  void remove_watch() {
    const std::lock_guard lock(mutex_);
    if (--num_watches_ > 0) return;
    for (const auto& [number, action] : before_ | std::views::reverse) ::sigaction(number, &action, nullptr);
    before_.clear();
  }

 private:
  void install(int number) {
    struct sigaction before{}, action{};
    ::sigaction(number, nullptr, &before);
    if (before.sa_handler != SIG_DFL) return;
    action.sa_handler = note_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART | (number == SIGINT ? SA_RESETHAND : 0);
    ::sigaction(number, &action, nullptr);
    before_.emplace_back(number, before);
  }

  std::mutex mutex_;
  int64_t num_watches_ = 0;
  std::vector<std::pair<int, struct sigaction>> before_;
};

Handlers& handlers() {
  static auto* handlers = new Handlers;  // outlives every thread that trains
  return *handlers;
}

}  // namespace

SignalWatch::SignalWatch(bool active) : active_(active) {
  if (active_) handlers().add_watch();
}

SignalWatch::~SignalWatch() {
  if (active_) handlers().remove_watch();
}

int SignalWatch::pending() const { return active_ ? noted_signal.load() : 0; }

std::string_view signal_name(int signal) {
  return signal == SIGINT ? "SIGINT" : signal == SIGTERM ? "SIGTERM" : "SIGUSR1";
}

void requeue_slurm_job() {
  const char* array = std::getenv("SLURM_ARRAY_JOB_ID");
  const std::string job =
      array == nullptr ? std::getenv("SLURM_JOB_ID") : fmt::format("{}_{}", array, std::getenv("SLURM_ARRAY_TASK_ID"));
  const std::string command = fmt::format("scontrol requeue {}", job);
  if (std::system(command.c_str()) != 0) log_warning("'{}' failed; the job is not queued again", command);
}

}  // namespace fulgur
