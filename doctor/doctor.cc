#include "fulgur/doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <iterator>
#include <optional>
#include <utility>

#include "fulgur/base/environment_variables.h"
#include "fulgur/base/terminal_size.h"
#include "fulgur/distributed/detached_call.h"
#include "fulgur/distributed/network.h"
#include "fulgur/doctor/check.h"
#include "fulgur/doctor/exchange.h"
#include "fulgur/doctor/host_checks.h"
#include "fulgur/doctor/network_checks.h"

namespace fulgur::doctor {
namespace {

constexpr size_t kUsualWidth = 120;

size_t terminal_width() {
  const auto size = terminal_size();
  return size ? size->columns : kUsualWidth;
}

}  // namespace

int examine(const ExamineOptions& options) {
  if (is_second_rank()) {
    check_exchange();
    return 0;
  }
  Checks checks = check_host({.folder = options.folder});
  const EnvironmentVariables variables = process_environment_variables();
  std::ranges::move(check_network_settings(interface_names(), variables), std::back_inserter(checks));
  prepare_exchange();  // before the thread, whose look-up of a name reads the environment
  auto master = detached_call<std::optional<Check>>([variables] { return check_master(variables); });
  Checks exchange = check_exchange();
  if (auto check = master.get()) checks.push_back(std::move(*check));
  std::ranges::move(exchange, std::back_inserter(checks));
  std::cout << (options.prints_json ? to_json(checks) : to_text(checks, terminal_width())) << std::flush;
  return any_problem(checks) ? 1 : 0;
}

}  // namespace fulgur::doctor
