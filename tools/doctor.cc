// Says what this machine has, and whether training would work on it:
//   bazel run //tools:doctor
#include "fulgur/doctor/doctor.h"

#include <CLI/CLI.hpp>

#include "fulgur/cli/command_line.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Says what this machine has, tries an exchange between two ranks, and says what to change where something "
      "would not work; the exit code is then 1.");
  bool as_json = false;
  app.add_flag("--json", as_json, "print JSON");
  CLI11_PARSE(app, argc, argv);
  int code = 0;
  const int failed = fulgur::exit_code_of([&] { code = fulgur::doctor::examine(as_json); });
  return failed != 0 ? failed : code;
}
