#include "trainer/signal_watch.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <ranges>
#include <string>

#include "core/logging.h"

namespace fulgur {
namespace {

std::atomic<int> noted_signal = 0;  // ranks may be threads
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler writes it");

extern "C" void note_signal(int number) { noted_signal = number; }

}  // namespace

SignalWatch::SignalWatch(bool active) {
  if (!active) return;
  noted_signal = 0;
  watch(SIGTERM);
  watch(SIGINT);
  if (std::getenv("SLURM_JOB_ID") != nullptr) watch(SIGUSR1);
}

SignalWatch::~SignalWatch() {
  for (const auto& [number, action] : before_ | std::views::reverse) ::sigaction(number, &action, nullptr);
}

int SignalWatch::pending() const { return before_.empty() ? 0 : noted_signal.load(); }

void SignalWatch::watch(int number) {
  struct sigaction before{}, action{};
  ::sigaction(number, nullptr, &before);
  if (before.sa_handler != SIG_DFL && before.sa_handler != note_signal) return;
  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART | (number == SIGINT ? SA_RESETHAND : 0);
  ::sigaction(number, &action, nullptr);
  before_.emplace_back(number, before);
}

void requeue_slurm_job() {
  const char* array = std::getenv("SLURM_ARRAY_JOB_ID");
  const std::string job =
      array == nullptr ? std::getenv("SLURM_JOB_ID") : fmt::format("{}_{}", array, std::getenv("SLURM_ARRAY_TASK_ID"));
  const std::string command = fmt::format("scontrol requeue {}", job);
  if (std::system(command.c_str()) != 0) log_warning("'{}' failed; the job is not queued again", command);
}

}  // namespace fulgur
