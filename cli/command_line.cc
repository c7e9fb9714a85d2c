#include "fulgur/cli/command_line.h"

#include <cstdio>
#include <filesystem>

#include "fulgur/base/error.h"
#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/cli/parse.h"
#include "fulgur/launch/session.h"

namespace fulgur {
namespace {

// Prints the message after the prefix `who`, "[rank 1] " or empty, and returns `exit_code`.
int report(int exit_code, const std::string& who, const std::string& message) {
  std::fflush(stdout);
  internal::write_error(who, message);
  return exit_code;
}

}  // namespace

bool parse_flags(const std::vector<std::string>& arguments, const std::string& program, const DescribeFields& describe,
                 const EnvironmentVariables& variables) {
  return parse_command_line(arguments, {.path = program, .describe = describe}, variables).has_value();
}

void enter_working_directory() { std::filesystem::current_path(working_directory()); }

int exit_code_of(const std::function<void()>& body) {
  try {
    std::exception_ptr failure;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    failure = process_session::end(failure);
    if (failure != nullptr) std::rethrow_exception(failure);
    return 0;
  } catch (const UsageError&) {
    return report(2, log_prefix(), text_of(std::current_exception()));
  } catch (const InterruptedError& error) {
    return report(error.exit_code, "", error.what());
  } catch (const DistributedError& error) {  // the message names the ranks
    return report(error.exit_code, "", error.what());
  } catch (...) {
    return report(1, log_prefix(), text_of(std::current_exception()));
  }
}

}  // namespace fulgur
