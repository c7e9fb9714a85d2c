// Says at which step two runs begin to differ, by which metric and by how much:
//   bazel run //tools:compare -- runs/first runs/second --equal
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/reports/command.h"
#include "fulgur/reports/compare_runs.h"
#include "fulgur/reports/run_folder.h"
#include "fulgur/reports/terminal_text.h"

namespace {

fulgur::RunFolder read(const std::filesystem::path& folder) {
  fulgur::RunFolder run = fulgur::ProgressReader(folder).read();
  for (const std::string& note : run.notes) {
    std::cout << fulgur::terminal_text(run.name + ": " + note) << '\n';
  }
  if (run.metrics.num_rows > 0) return run;
  throw fulgur::UsageError("'" + fulgur::terminal_text(run.name) +
                           "' has no metrics to compare; let a CSVLogger write metrics.csv there");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Says at which step two runs begin to differ, by which metric and by how much.");
  std::string first, second;
  bool must_be_equal = false;
  fulgur::CompareOptions options;
  app.add_option("first", first, "folder of a run, such as runs/version_0")->required();
  app.add_option("second", second, "folder of another run")->required();
  app.add_flag("--equal", must_be_equal, "exit with code 1 if the runs differ");
  app.add_flag("--all", options.compares_machine, "compare throughput, waiting for data, memory and devices too");
  return fulgur::run_command(app, argc, argv, [&] {
    const fulgur::RunFolder a = read(first), b = read(second);
    const fulgur::RunComparison comparison = compare_runs(a.metrics, b.metrics, options);
    std::cout << to_text(comparison, a.name, b.name);
    return must_be_equal && !comparison.are_equal() ? 1 : 0;
  });
}
