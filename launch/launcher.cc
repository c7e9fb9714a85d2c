#include "fulgur/launch/launcher.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/distributed/network.h"
#include "fulgur/distributed/to_milliseconds.h"

namespace fulgur {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kKeptBytes = 64 << 10;  // limit per rank; the end of the output is kept
constexpr std::chrono::milliseconds kPoll{20};

struct Child {
  int64_t rank = 0;
  pid_t pid = -1;
  int output = -1;  // the read end of a pipe; -1: closed
  std::string kept{};
  bool is_shown = false;  // output is copied to stderr as it comes
  std::string to_show{};  // output not shown yet; begins at the start of a line
  bool ended = false;
  std::optional<int> exit_code{};  // 128 + signal if it was killed; nullopt: still running, or unknown
  int ended_by_signal = 0;         // 0 if no signal ended it
  bool killed_by_us = false;

  bool failed() const { return exit_code.value_or(0) != 0 && !killed_by_us; }
};

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find('\0', begin), all.size());
    arguments.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return arguments;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

EnvironmentVariables child_variables(EnvironmentVariables variables, const ClusterEnvironment& mine, int64_t local_rank,
                                     int64_t num_threads) {
  variables["RANK"] = std::to_string(mine.rank + local_rank);
  variables["WORLD_SIZE"] = std::to_string(mine.world_size);
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(mine.local_world_size);
  variables["NODE_RANK"] = std::to_string(mine.node_rank);
  variables["MASTER_ADDR"] = mine.master_address;
  variables["MASTER_PORT"] = std::to_string(mine.master_port);
  variables["FULGUR_PARENT_PID"] = std::to_string(::getpid());
  if (!find_variable(variables, "OMP_NUM_THREADS")) variables["OMP_NUM_THREADS"] = std::to_string(num_threads);
  return variables;
}

std::vector<std::string> as_strings(const EnvironmentVariables& variables) {
  std::vector<std::string> strings;
  for (const auto& [name, value] : variables) strings.push_back(fmt::format("{}={}", name, value));
  return strings;
}

// Runs between fork and exec: makes only calls that are safe after a fork in a process with several threads.
[[noreturn]] void become(char** arguments, char** variables, int output, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // the parent ended before prctl()
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int no_input = ::open("/dev/null", O_RDONLY);
  ::dup2(no_input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  ::close_range(3, ~0U, 0);
  ::execve("/proc/self/exe", arguments, variables);
  ::_exit(127);
}

// The kernel keeps no exit codes for a process that ignores SIGCHLD; programs inherit the setting from their parents.
void keep_exit_codes() {
  struct sigaction action{};
  if (::sigaction(SIGCHLD, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) std::signal(SIGCHLD, SIG_DFL);
}

int exit_code_of(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

// Removes the first line from `output` and returns it.
std::string_view next_line(std::string_view& output) {
  const std::string_view line = output.substr(0, output.find('\n'));
  output.remove_prefix(std::min(line.size() + 1, output.size()));
  return line;
}

std::string prefix_of(int64_t rank) { return fmt::format("[rank {}] ", rank); }

std::string prefixed(int64_t rank, std::string_view line) {
  const std::string prefix = prefix_of(rank);
  return fmt::format("{}{}", line.starts_with(prefix) ? "" : prefix, line);
}

// The kept output: each line prefixed with the rank, after a line break.
std::string output_of(const Child& child) {
  std::string lines;
  for (std::string_view rest = child.kept; !rest.empty();) lines += "\n" + prefixed(child.rank, next_line(rest));
  return lines;
}

// The last cause that the rank itself printed: "boom" of "[rank 1] error: boom". Empty if it printed none.
std::string_view cause_of(const Child& child) {
  constexpr std::string_view kError = "error: ";
  const std::string prefix = prefix_of(child.rank);
  std::string_view cause;
  for (std::string_view rest = child.kept; !rest.empty();) {
    std::string_view line = next_line(rest);
    if (line.starts_with(prefix)) line.remove_prefix(prefix.size());
    if (line.starts_with(kError)) cause = line.substr(kError.size());
  }
  return cause;
}

// Whether the output of the other ranks is shown as it comes.
bool shows_all(const EnvironmentVariables& variables) {
  const auto value = find_variable(variables, "FULGUR_RANK_OUTPUT");
  if (!value) return false;
  if (*value == "all") return true;
  throw UsageError(fmt::format(
      "FULGUR_RANK_OUTPUT={}: write all, which shows what every rank prints as it comes, or unset it, which "
      "shows what a rank has printed if it fails",
      *value));
}

// Another thread may hold the stream, or no program may read it: after 300 ms the function returns without the output.
void print_and_flush(const std::string& message) {
  const auto done = std::make_shared<std::promise<void>>();
  std::thread([message, done] {
    std::fputs(message.c_str(), stderr);
    std::fflush(nullptr);
    done->set_value();
  }).detach();
  done->get_future().wait_for(std::chrono::milliseconds(300));
}

DistributedError error_of(const Child& child) {
  const int code = *child.exit_code;
  const std::string_view cause = cause_of(child);
  const int signal = child.ended_by_signal;
  const std::string how = signal != 0     ? fmt::format("was ended by signal {} ({})", signal, ::strsignal(signal))
                          : cause.empty() ? fmt::format("ended with exit code {}", code)
                                          : fmt::format("failed: {} (exit code {})", cause, code);
  const std::string self = fmt::format("rank {}", child.rank);
  const bool names_itself = cause.starts_with(self + " ") || cause.starts_with(self + ":");
  const std::string what = signal == 0 && names_itself ? std::string(cause) : self + " " + how;
  return DistributedError(what + (child.is_shown ? "" : output_of(child)), child.rank, code);
}

ClusterEnvironment environment_of_node(const LauncherOptions& options, const EnvironmentVariables& variables) {
  ClusterEnvironment environment{.name = "fulgur",
                                 .world_size = options.local_world_size * options.num_nodes,
                                 .local_world_size = options.local_world_size};
  if (options.num_nodes == 1) return environment;
  for (const char* name : {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    if (find_variable(variables, name)) continue;
    throw UsageError(
        fmt::format("num_nodes={}: {} is not set; set NODE_RANK (0 to {}), MASTER_ADDR (the host with "
                    "NODE_RANK 0) and MASTER_PORT (a free port there) on every host",
                    options.num_nodes, name, options.num_nodes - 1));
  }
  const std::string node_rank = variables.at("NODE_RANK");
  if (node_rank.find_first_not_of("0123456789") != std::string::npos || node_rank.size() > 9 ||
      std::stoll(node_rank) >= options.num_nodes) {
    throw UsageError(fmt::format("NODE_RANK={} contradicts num_nodes={}: it counts from 0 to {}", node_rank,
                                 options.num_nodes, options.num_nodes - 1));
  }
  const ClusterEnvironment node = *detect_cluster_environment({{"RANK", node_rank},
                                                               {"WORLD_SIZE", std::to_string(options.num_nodes)},
                                                               {"LOCAL_RANK", "0"},
                                                               {"MASTER_ADDR", variables.at("MASTER_ADDR")},
                                                               {"MASTER_PORT", variables.at("MASTER_PORT")}});
  environment.node_rank = node.rank;
  environment.rank = node.rank * options.local_world_size;
  environment.master_address = node.master_address;
  environment.master_port = node.master_port;
  return environment;
}

}  // namespace

int64_t threads_per_rank(int64_t local_world_size) {
  return std::max<int64_t>(1, static_cast<int64_t>(cores_of_process().size()) / local_world_size);
}

// A separate thread starts the children, reads their output and reaps them. It lives as long as they do, because the
// kernel takes the thread that started a child for its parent.
class Launcher::Impl {
 public:
  Impl(const LauncherOptions& options, const EnvironmentVariables& variables)
      : options_(options), environment_(environment_of_node(options, variables)) {
    const bool is_shown = shows_all(variables);
    if (options.num_nodes == 1) {
      LoopbackListener listener;
      environment_.master_address = listener.address();
      environment_.master_port = listener.port();
      environment_.listening_descriptor = listener.release();
    }
    const int64_t num_threads = threads_per_rank(options.local_world_size);
    if (!find_variable(variables, "OMP_NUM_THREADS")) at::set_num_threads(static_cast<int>(num_threads));
    for (int64_t local_rank = 1; local_rank < options.local_world_size; ++local_rank) {
      children_.push_back({.rank = environment_.rank + local_rank, .is_shown = is_shown});
      child_variables_.push_back(as_strings(child_variables(variables, environment_, local_rank, num_threads)));
    }
    monitor_ = std::thread([this] { watch(); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return started_; });
    if (!start_error_.empty()) {
      lock.unlock();
      stop();
      throw DistributedError(start_error_);
    }
  }

  ~Impl() { stop(); }

  const ClusterEnvironment& environment() const { return environment_; }

  void check() {
    const std::lock_guard lock(mutex_);
    for (const Child& child : children_) {
      if (child.failed()) throw error_of(child);
      if (!child.ended) continue;
      throw DistributedError(
          fmt::format("rank {} ended with {} before the ranks had met{}", child.rank,
                      child.exit_code ? "exit code 0" : "an unknown exit code", child.is_shown ? "" : output_of(child)),
          child.rank);
    }
  }

  void expect_failure() {
    const std::lock_guard lock(mutex_);
    if (!failure_expected_at_) failure_expected_at_ = Clock::now();
  }

  void finish() {
    std::unique_lock lock(mutex_);
    main_has_ended_ = true;
    changed_.wait_for(lock, to_milliseconds(options_.timeout_s), [this] { return all_ended() || first_failed_; });
    if (first_failed_) throw end_after_failure(lock);
    if (all_ended()) return warn_of_unknown_exit_codes();
    const auto running = std::ranges::find_if(children_, [](const Child& child) { return !child.ended; });
    const int64_t rank = running->rank;
    kill_all();
    throw DistributedError(
        fmt::format("rank {} did not end within {} s after rank {}", rank, options_.timeout_s, environment_.rank),
        rank);
  }

  [[noreturn]] void fail(const std::exception_ptr& error) {
    std::unique_lock lock(mutex_);
    main_has_ended_ = true;
    wait_for_end(lock);
    try {
      std::rethrow_exception(error);
    } catch (const DistributedError& distributed) {
      if (distributed.rank_is_ending) wait_for_end_of(*distributed.failed_rank, lock);
      kill_all();
      throw_error_of(distributed.failed_rank);
      throw;
    } catch (...) {
      kill_all();
      throw;
    }
  }

 private:
  // Throws the error of the child `rank` if it failed; without `rank`, the error of the first child that failed.
  // Returns if the child ended well or was killed by this process, or if no child has this rank.
  void throw_error_of(std::optional<int64_t> rank) const {
    if (!rank && first_failed_) throw error_of(children_[*first_failed_]);
    for (const Child& child : children_) {
      if (child.rank == rank && child.failed()) throw error_of(child);
    }
  }

  void warn_of_unknown_exit_codes() const {
    for (const Child& child : children_) {
      if (child.exit_code) continue;
      log_warning(
          "rank {} has ended, but whether it failed is not known: this program ignores SIGCHLD, or waits for "
          "any child (waitpid(-1)); let it wait for its own",
          child.rank);
    }
  }

  bool all_ended() const {
    return std::ranges::all_of(children_, [](const Child& child) { return child.ended && child.output < 0; });
  }

  void wait_for_end(std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, to_milliseconds(options_.kill_after_s), [this] { return all_ended(); });
  }

  void wait_for_end_of(int64_t rank, std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, to_milliseconds(options_.timeout_s), [&] {
      return std::ranges::none_of(children_, [&](const Child& child) { return child.rank == rank && !child.ended; });
    });
  }

  DistributedError end_after_failure(std::unique_lock<std::mutex>& lock) {
    wait_for_end(lock);
    kill_all();
    return error_of(children_[*first_failed_]);
  }

  void kill_all() {
    for (Child& child : children_) {
      if (child.ended) continue;
      child.killed_by_us = true;
      ::kill(child.pid, SIGKILL);
    }
  }

  void stop() {
    if (!monitor_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      main_has_ended_ = true;
      kill_all();
      stop_ = true;
    }
    monitor_.join();
  }

  void watch() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are handled by the threads of the program
    {
      const std::lock_guard lock(mutex_);
      start_children();
      started_ = true;
    }
    changed_.notify_all();
    while (true) {
      read_output();
      {
        const std::lock_guard lock(mutex_);
        reap();
      }
      show_output();
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
      if (stop_ && std::ranges::all_of(children_, [](const Child& child) { return child.ended; })) return;
      if (first_failed_ && !main_has_ended_ && main_is_late()) end_process();
    }
  }

  bool main_is_late() const {
    if (failure_expected_at_) return Clock::now() > *failure_expected_at_ + to_milliseconds(options_.timeout_s);
    return Clock::now() > failed_at_ + to_milliseconds(options_.grace_s);
  }

  void start_children() {
    keep_exit_codes();
    std::vector<std::string> arguments = own_command_line();
    const std::vector<char*> argument_pointers = pointers_to(arguments);
    for (size_t i = 0; i < children_.size() && start_error_.empty(); ++i) {
      const std::vector<char*> variable_pointers = pointers_to(child_variables_[i]);
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) {
        start_error_ = fmt::format("cannot make a pipe for rank {}: {}", children_[i].rank, std::strerror(errno));
        break;
      }
      const pid_t parent = ::getpid();
      const pid_t pid = ::fork();
      if (pid == 0) {
        become(const_cast<char**>(argument_pointers.data()), const_cast<char**>(variable_pointers.data()), ends[1],
               parent);
      }
      ::close(ends[1]);
      if (pid < 0) {
        start_error_ = fmt::format("cannot start rank {}: {}", children_[i].rank, std::strerror(errno));
        ::close(ends[0]);
        break;
      }
      children_[i].pid = pid;
      children_[i].output = ends[0];
    }
    std::erase_if(children_, [](const Child& child) { return child.pid < 0; });
  }

  // Waits up to kPoll for output. Only this thread changes `output`, `kept` and `to_show` of a child.
  void read_output() {
    std::vector<pollfd> polled;
    for (const Child& child : children_) polled.push_back({.fd = child.output, .events = POLLIN, .revents = 0});
    ::poll(polled.data(), polled.size(), static_cast<int>(kPoll.count()));
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) read_some(children_[i]);
    }
  }

  // Shows whole lines, and the rest after a child's output has ended. Runs without the lock: writing to stderr may
  // block.
  void show_output() {
    for (Child& child : children_) {
      std::string_view rest = child.to_show;
      std::string lines;
      while (rest.find('\n') != std::string_view::npos || (child.output < 0 && !rest.empty()))
        lines += prefixed(child.rank, next_line(rest)) + "\n";
      child.to_show = std::string(rest);
      for (std::string_view left = lines; !left.empty();) {
        const ssize_t size = ::write(STDERR_FILENO, left.data(), left.size());
        if (size < 0 && errno != EINTR) break;
        left.remove_prefix(static_cast<size_t>(std::max<ssize_t>(size, 0)));
      }
    }
  }

  static void read_some(Child& child) {
    char buffer[16 << 10];
    const ssize_t size = ::read(child.output, buffer, sizeof buffer);
    if (size > 0) {
      child.kept.append(buffer, static_cast<size_t>(size));
      if (child.is_shown) child.to_show.append(buffer, static_cast<size_t>(size));
      if (child.kept.size() > 2 * kKeptBytes) child.kept.erase(0, child.kept.size() - kKeptBytes);
    } else if (size == 0 || errno != EINTR) {
      close_output(child);
    }
  }

  static void close_output(Child& child) { ::close(std::exchange(child.output, -1)); }

  void reap() {
    for (size_t i = 0; i < children_.size(); ++i) {
      Child& child = children_[i];
      int status = 0;
      if (child.ended) continue;
      const pid_t reaped = ::waitpid(child.pid, &status, WNOHANG);
      if (reaped != child.pid && !(reaped < 0 && errno == ECHILD)) continue;
      child.ended = true;
      if (reaped == child.pid) child.exit_code = exit_code_of(status);
      if (reaped == child.pid && WIFSIGNALED(status)) child.ended_by_signal = WTERMSIG(status);
      drain(child);
      if (!first_failed_ && child.failed()) {
        first_failed_ = i;
        failed_at_ = Clock::now();
      }
    }
  }

  // Reads the rest of the pipe, but does not wait for its end: a grandchild may hold the pipe open.
  static void drain(Child& child) {
    if (child.output < 0) return;
    ::fcntl(child.output, F_SETFL, O_NONBLOCK);
    for (size_t before = 0; child.output >= 0;) {
      before = child.kept.size();
      read_some(child);
      if (child.output >= 0 && child.kept.size() == before) close_output(child);
    }
  }

  // Ends a program that does not notice the failure of a rank: it computes endlessly, or waits for something else.
  [[noreturn]] void end_process() {
    const DistributedError error = error_of(children_[*first_failed_]);
    kill_all();
    for (const Child& child : children_) {
      if (!child.ended) ::waitpid(child.pid, nullptr, 0);
    }
    print_and_flush(fmt::format("error: {}\nerror: rank {} did not stop within {:g} s after that, and is ended\n",
                                error.what(), environment_.rank,
                                failure_expected_at_ ? options_.timeout_s : options_.grace_s));
    ::_exit(error.exit_code);
  }

  const LauncherOptions options_;
  ClusterEnvironment environment_;
  std::vector<std::vector<std::string>> child_variables_{};
  std::mutex mutex_{};
  std::condition_variable changed_{};
  std::vector<Child> children_{};
  std::optional<size_t> first_failed_{};  // index into children_
  Clock::time_point failed_at_{};
  std::optional<Clock::time_point> failure_expected_at_{};
  std::string start_error_{};
  bool started_ = false;
  bool main_has_ended_ = false;
  bool stop_ = false;
  std::thread monitor_{};
};

Launcher::Launcher(const LauncherOptions& options, const EnvironmentVariables& variables)
    : impl_(std::make_unique<Impl>(options, variables)) {}
Launcher::~Launcher() = default;

const ClusterEnvironment& Launcher::environment() const { return impl_->environment(); }
void Launcher::check() { impl_->check(); }
void Launcher::expect_failure() { impl_->expect_failure(); }
void Launcher::finish() { impl_->finish(); }
void Launcher::fail(std::exception_ptr error) { impl_->fail(error); }

}  // namespace fulgur
