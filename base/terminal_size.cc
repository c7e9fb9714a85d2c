#include "fulgur/base/terminal_size.h"

#include <sys/ioctl.h>
#include <unistd.h>

namespace fulgur {

std::optional<TerminalSize> terminal_size() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return TerminalSize{.columns = size.ws_col, .rows = size.ws_row};
}

}  // namespace fulgur
