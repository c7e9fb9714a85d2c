#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace fulgur {

// The main() of a program that trains nothing: parses the arguments, makes relative paths
// relative to the folder in which the command was typed, and runs `body`, which returns the exit code. After an
// exception its message is printed to stderr, and the exit code is 2 for arguments that cannot be used (also
// UsageError), otherwise 1.
int run_command(CLI::App& app, int argc, char** argv, const std::function<int()>& body);

}  // namespace fulgur
