#pragma once

#include <cstddef>
#include <optional>

namespace fulgur {

struct TerminalSize {
  size_t columns = 80;
  size_t rows = 24;
};

// The size of the terminal that stdout is, as it is now: a window may be resized. Returns nullopt if stdout is no
// terminal, or one that does not say how wide it is.
std::optional<TerminalSize> terminal_size();

}  // namespace fulgur
