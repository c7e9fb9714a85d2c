#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/environment_variables.h"

namespace fulgur {

// Sets the described fields, each from the last of these that has a value for it: TOML files (--config=run.toml, from
// left to right), environment variables (FULGUR_TRAINER__MAX_EPOCHS=5, FULGUR__LR=1e-3), flags (--lr=1e-3, --lr 1e-3,
// --max-epochs=5 for max_epochs, the last one of a name). Fields of the section "trainer" need not name it.
//   Returns false if an argument asked for a text instead of a run: --help (the common options; --help=all,
// --help=strategy), --print_config (all options as TOML, each with where it comes from), --completion=bash, --doctor
// (what this machine has, and what would not work), --version (of fulgur and libtorch). Throws UsageError with all that
// is wrong and where: unknown names (with the nearest), values that do not parse or are out of range, files that cannot
// be read.
bool parse_flags(const std::vector<std::string>& arguments, const std::string& program, const DescribeFields& describe,
                 const EnvironmentVariables& variables = process_environment_variables());

// Makes relative paths relative to the folder in which the command was typed, also under `bazel run`.
void enter_working_directory();

// Runs `body`, waits for the other ranks if a Trainer has started some, and returns the exit code: 0; 2 after a
// UsageError; 128 + the signal's number after an InterruptedError; the exit code of the failed rank after a
// DistributedError; 1 after any other exception, of any type. The error is printed to stderr without a stack trace,
// and, with several ranks, with the rank that it comes from.
int exit_code_of(const std::function<void()>& body);

// A complete main():
//   int main(int argc, char** argv) { return run_command_line(argc, argv, +[](MyOptions options) { ... }); }
// with an options struct that has `void describe(FieldVisitor&)`.
template <class Options>
int run_command_line(int argc, char** argv, void (*run)(Options)) {
  return exit_code_of([&] {
    enter_working_directory();
    Options options;
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (parse_flags(arguments, argv[0], [&](FieldVisitor& visit) { options.describe(visit); })) run(std::move(options));
  });
}

}  // namespace fulgur
