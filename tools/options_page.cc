// Prints docs/options.md:
//   ./bazelw run //tools:options_page > docs/options.md
#include "fulgur/cli/options_page.h"

#include <cstdio>

int main() { std::fputs(fulgur::options_page().c_str(), stdout); }
