#include "fulgur/base/terminal_size.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>

namespace fulgur {
namespace {

// What terminal_size() says while stdout is the file, which is closed.
std::optional<TerminalSize> size_of_stdout(int file) {
  const int before = dup(STDOUT_FILENO);
  dup2(file, STDOUT_FILENO);
  const auto size = terminal_size();
  dup2(before, STDOUT_FILENO);
  close(before);
  close(file);
  return size;
}

TEST(TerminalSize, IsThatOfStdout) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  const winsize given{.ws_row = 10, .ws_col = 33, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(ioctl(terminal, TIOCSWINSZ, &given), 0);
  const auto size = size_of_stdout(terminal);
  ASSERT_TRUE(size);
  EXPECT_EQ(size->columns, 33u);
  EXPECT_EQ(size->rows, 10u);
}

TEST(TerminalSize, IsUnknownWhereNothingSaysIt) {
  EXPECT_FALSE(size_of_stdout(posix_openpt(O_RDWR | O_NOCTTY)));  // a terminal without a size
  EXPECT_FALSE(size_of_stdout(open("/dev/null", O_WRONLY)));
}

}  // namespace
}  // namespace fulgur
