#include "fulgur/reports/command.h"

#include <CLI/CLI.hpp>
#include <exception>
#include <filesystem>
#include <iostream>

#include "fulgur/base/error.h"
#include "fulgur/base/version.h"
#include "fulgur/base/working_directory.h"

namespace fulgur {
namespace {

int report_error(const std::exception& error, int exit_code) {
  std::cout << std::flush;
  std::cerr << "error: " << error.what() << '\n';
  return exit_code;
}

}  // namespace

int run_command(CLI::App& app, int argc, char** argv, const std::function<int()>& body) try {
  app.set_version_flag("--version", "fulgur " FULGUR_VERSION);
  app.parse(argc, argv);
  std::filesystem::current_path(working_directory());
  return body();
} catch (const CLI::ParseError& error) {
  return app.exit(error) == 0 ? 0 : 2;
} catch (const UsageError& error) {
  return report_error(error, 2);
} catch (const std::exception& error) {
  return report_error(error, 1);
}

}  // namespace fulgur
