// Says what this machine has, and whether training would work on it:
//   bazel run //tools:doctor
#include "fulgur/doctor/doctor.h"

#include <CLI/CLI.hpp>

#include "fulgur/reports/command.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Says what this machine has, tries an exchange between two ranks, and says what to change where something "
      "would not work; the exit code is then 1.");
  fulgur::doctor::ExamineOptions options;
  app.add_flag("--json", options.prints_json, "print JSON instead of lines");
  return fulgur::run_command(app, argc, argv, [&] { return fulgur::doctor::examine(options); });
}
