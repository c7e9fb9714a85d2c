#pragma once

#include <ATen/core/stack.h>

#include <cstddef>
#include <string_view>

namespace fulgur::program {

// A function of Python.
struct SizeFunction {
  size_t num_arguments;
  void (*call)(torch::jit::Stack&);  // takes its arguments from the end of the stack and leaves its result there
};

// Python's arithmetic on sizes and flags, which torch.export leaves in a graph as functions of Python: integers,
// fractions and booleans in, one of them out. "_operator.floordiv" and "torch.sym_max", for example, follow Python's
// rules for negative numbers and mixed types. Null if the function is not known. A function throws c10::ValueError for
// what is no number, where Python would raise an exception (a division by zero, the root of a negative number), and for
// a result beyond 64 bits.
const SizeFunction* find_size_arithmetic(std::string_view target);

}  // namespace fulgur::program
