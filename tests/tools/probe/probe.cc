#include "tests/tools/probe/lib.h"
#include <iostream>
int main() { std::cout << two().numel() << "\n"; }
