#include <iostream>
#include "tests/tools/probe/lib.h"
int main() { std::cout << two().numel() << "\n"; }
