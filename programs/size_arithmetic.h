#pragma once

#include <ATen/core/stack.h>

#include <string_view>

namespace fulgur::program {

// Takes its arguments from the end of the stack and leaves its result there.
using StackFunction = void (*)(torch::jit::Stack&);

// Python's arithmetic on sizes and flags, which torch.export leaves in a graph as functions of Python: integers,
// fractions and booleans in, one of them out. "_operator.floordiv" and "torch.sym_max", for example, follow Python's
// rules for negative numbers and mixed types. Null if the function is not known. A function throws c10::ValueError for
// a division by zero and for a result beyond 64 bits.
StackFunction find_size_arithmetic(std::string_view target);

}  // namespace fulgur::program
