#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/base/environment_variables.h"
#include "fulgur/base/setting.h"
#include "fulgur/cli/help.h"

namespace fulgur {

struct ProgramDescription {
  std::string path;         // argv[0]
  DescribeFields describe;  // visits the options
  std::vector<Subcommand> subcommands{};

  // Returns values for options that nothing has set; called when all others have their values.
  std::function<std::vector<Setting>(std::string_view subcommand)> fill{};
};

struct ParsedCommandLine {
  std::string subcommand{};  // the first one if none was given; empty if there are none
  std::string config{};      // all options as a TOML file
  // Paths of the options that flags and config files have set, such as "data.batch_size". Those that environment
  // variables have set are left out: the variables stay for the next command.
  std::vector<std::string> set{};
};

// Sets a program's options as parse_flags says. nullopt: what was asked for, such as help, is printed, and nothing is
// to be done. Throws UsageError.
std::optional<ParsedCommandLine> parse_command_line(std::vector<std::string> arguments,
                                                    const ProgramDescription& program,
                                                    const EnvironmentVariables& variables);

}  // namespace fulgur
