#include "fulgur/launch/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "fulgur/base/environment_variables.h"
#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"
#include "fulgur/launch/rendezvous.h"

namespace fulgur {
namespace {

std::string list_of(const std::vector<c10::Device>& devices) {
  std::vector<std::string> names;
  for (const c10::Device& device : devices) names.push_back(device.str());
  return fmt::format("{}", fmt::join(names, ", "));
}

int exit_code_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DistributedError& distributed_error) {
    return distributed_error.exit_code;
  } catch (...) {
    return 1;
  }
}

// The session of the process, which ends it at exit if end() was not called.
struct ProcessSession {
  std::unique_ptr<Session> session{};
  std::vector<c10::Device> devices{};
  int64_t num_nodes = 0;
  bool failed = false;
  pid_t pid = 0;  // the process in which the session was created

  static ProcessSession& instance() {
    static auto* const never_destroyed = new ProcessSession;
    return *never_destroyed;
  }

  // To be called after each session is created: what is registered last runs first, and at_exit() needs what a
  // transport ends at exit, such as MPI.
  void end_at_exit() {
    pid = ::getpid();
    ::on_exit([](int status, void* self) { static_cast<ProcessSession*>(self)->at_exit(status); }, this);
  }

  // A child that was forked, and ends by exit() because exec failed, inherits the handler, but is no rank.
  void at_exit(int status) {
    if (session == nullptr || ::getpid() != pid) return;
    if (session->busy()) return exit_in_a_run(status);
    const auto own = status == 0 ? nullptr : error_of_this_rank("ended with exit code {}", status);
    const std::exception_ptr error = process_session::end(own);
    if (own == nullptr && error != nullptr) end_process(text_of(error), exit_code_of(error));
  }

  // The session is leaked, because other threads may still use it.
  void exit_in_a_run(int status) {
    const auto own = error_of_this_rank("called exit({}) in the middle of a run", status);
    try {
      session.release()->fail(own);
    } catch (...) {
    }
    if (status == 0) end_process(text_of(own), 1);
    print(text_of(own));
  }

  std::exception_ptr error_of_this_rank(fmt::format_string<int&> what, int status) const {
    const int64_t rank = session->environment().rank;
    return std::make_exception_ptr(DistributedError(fmt::format("rank {} {}", rank, fmt::format(what, status)), rank));
  }

  static void print(const std::string& message) { std::fprintf(stderr, "error: %s\n", message.c_str()); }

  [[noreturn]] static void end_process(const std::string& message, int exit_code) {
    print(message);
    std::fflush(nullptr);
    std::_Exit(exit_code);
  }
};

}  // namespace

Session::Session(const SessionOptions& options) {
  const EnvironmentVariables variables = process_environment_variables();
  const auto num_devices = static_cast<int64_t>(options.devices.size());
  if (const auto detected = detect_cluster_environment(variables, num_devices * options.num_nodes)) {
    environment_ = *detected;
    check_world_size(environment_, num_devices, options.num_nodes);
  } else if (num_devices * options.num_nodes > 1) {
    launcher_.emplace(
        LauncherOptions{
            .local_world_size = num_devices, .num_nodes = options.num_nodes, .timeout_s = options.world.timeout_s},
        variables);
    environment_ = launcher_->environment();
  }
  set_log_rank(environment_.rank, environment_.world_size);
  WorldOptions world = options.world;
  world.device = options.devices.at(static_cast<size_t>(environment_.local_rank) % options.devices.size());
  try {
    world_.emplace(connect_world(environment_, world, [this] {
      if (launcher_) launcher_->check();
    }));
  } catch (...) {
    if (launcher_) launcher_->fail(std::current_exception());
    throw;
  }
}

Session::~Session() = default;

void Session::abort(const std::string& reason) {
  if (launcher_) launcher_->expect_failure();
  world_->abort(reason);
}

void Session::fail(std::exception_ptr error) {
  abort(text_of(error));
  try {
    if (launcher_) launcher_->fail(error);
  } catch (...) {
    error = std::current_exception();
  }
  const bool all_have_ended = launcher_ && environment_.local_world_size == environment_.world_size;
  if (!all_have_ended) world_->wait_for_others();
  std::rethrow_exception(error);
}

void Session::finish() {
  try {
    world_->leave();
  } catch (...) {
    fail(std::current_exception());
  }
  world_.reset();
  if (launcher_) launcher_->finish();
}

namespace process_session {

Session& join(const SessionOptions& options) {
  ProcessSession& process = ProcessSession::instance();
  if (process.failed)
    throw DistributedError("the ranks of this process ended when an earlier run failed; start the program again");
  if (process.session == nullptr) {
    process.failed = true;  // until the session is created
    try {
      process.session = std::make_unique<Session>(options);
      process.end_at_exit();
      process.failed = false;
    } catch (const UsageError&) {
      process.failed = false;
      throw;
    }
    process.devices = options.devices;
    process.num_nodes = options.num_nodes;
  }
  if (process.devices.size() != options.devices.size() || process.num_nodes != options.num_nodes) {
    throw UsageError(
        fmt::format("an earlier run of this process was made with devices = {} and num_nodes = {}, and its ranks serve "
                    "all later ones; got devices = {} and num_nodes = {}",
                    process.devices.size(), process.num_nodes, options.devices.size(), options.num_nodes));
  }
  if (process.devices != options.devices) {
    throw UsageError(
        fmt::format("an earlier run of this process was made on {}, and its ranks serve all later ones; got {}: give "
                    "accelerator and devices the same values in every run, or write a program for each",
                    list_of(process.devices), list_of(options.devices)));
  }
  return *process.session;
}

bool joined() { return ProcessSession::instance().session != nullptr; }

std::exception_ptr end(std::exception_ptr error) {
  ProcessSession& process = ProcessSession::instance();
  const std::unique_ptr<Session> session = std::move(process.session);
  if (session == nullptr) return error;
  process.failed = error != nullptr;
  try {
    if (error != nullptr) session->fail(error);
    session->finish();
    return nullptr;
  } catch (...) {
    process.failed = true;
    return std::current_exception();
  }
}

}  // namespace process_session

}  // namespace fulgur
