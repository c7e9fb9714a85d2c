#pragma once

#include <span>
#include <string>
#include <string_view>

#include "fulgur/cli/config.h"

namespace fulgur {

// A part of a program, which its first argument names: fit.
struct Subcommand {
  std::string_view name, help;
  bool is_offered = true;  // false: neither help nor completion show it, because it would end with an error
};

// The help of a program: its subcommands and options with their present values, those of the same section together.
// `about`: empty for the common options of the trainer and all others; "all"; or the section or option that is asked
// for, with all that is in it. Throws UsageError if there is none.
std::string help_text(const Config& config, std::string_view program, std::span<const Subcommand> subcommands,
                      std::string_view about);

// A script for bash that completes the program's subcommands, flags, and their values where these are names or files:
//   source <(digits --completion=bash)
std::string bash_completion(const Config& config, std::string_view program, std::span<const Subcommand> subcommands);

}  // namespace fulgur
