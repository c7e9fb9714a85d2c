#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace fulgur {

// The main() of a program that trains nothing: parses the arguments, makes relative paths relative to the folder in
// which the command was typed, and runs `body`, which returns the exit code. The message of an exception is printed to
// stderr; the exit code is then 2 for a UsageError or arguments that cannot be used, otherwise 1.
int run_command(CLI::App& app, int argc, char** argv, const std::function<int()>& body);

}  // namespace fulgur
