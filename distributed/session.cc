#include "distributed/session.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "distributed/environment_variables.h"

namespace fulgur {
namespace {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& c10_error) {
    return c10_error.what_without_backtrace();
  } catch (const std::exception& std_error) {
    return std_error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
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

// The session of the process, and what becomes of it if nobody calls end().
class ProcessSession {
 public:
  ~ProcessSession() {
    if (!session) return;
    const bool too_early = session->busy();
    const std::exception_ptr error = process_session::end(
        too_early ? std::make_exception_ptr(DistributedError("this rank's process ended in the middle of a run"))
                  : nullptr);
    if (error == nullptr || too_early) return;
    std::fprintf(stderr, "error: %s\n", message_of(error).c_str());
    std::fflush(nullptr);
    std::_Exit(exit_code_of(error));  // that of a failed run, though main() has returned another
  }
  static ProcessSession& instance() {
    static ProcessSession session;
    return session;
  }

  std::unique_ptr<Session> session{};
  int64_t num_devices = 0, num_nodes = 0;
  bool failed = false;
};

}  // namespace

Session::Session(const SessionOptions& options) {
  const EnvironmentVariables variables = process_environment_variables();
  const auto num_devices = static_cast<int64_t>(options.devices.size());
  if (const auto detected = detect_cluster_environment(variables)) {
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
    world_.emplace(environment_, world);
  } catch (...) {
    if (launcher_) launcher_->fail(std::current_exception());
    throw;
  }
}

Session::~Session() = default;

void Session::abort(std::string_view reason) { world_->abort(reason); }

void Session::fail(std::exception_ptr error) {
  world_->abort(message_of(error));
  world_.reset();
  if (launcher_) launcher_->fail(std::move(error));
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
  const auto num_devices = static_cast<int64_t>(options.devices.size());
  if (process.failed) throw DistributedError("the ranks of this process ended when an earlier run failed; start anew");
  if (process.session == nullptr) {
    process.session = std::make_unique<Session>(options);
    process.num_devices = num_devices;
    process.num_nodes = options.num_nodes;
  }
  if (process.num_devices != num_devices || process.num_nodes != options.num_nodes) {
    throw UsageError(
        fmt::format("an earlier run of this process was made with devices = {} and num_nodes = {}, and its ranks serve "
                    "all later ones; got devices = {} and num_nodes = {}",
                    process.num_devices, process.num_nodes, num_devices, options.num_nodes));
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
