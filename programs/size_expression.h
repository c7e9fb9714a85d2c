#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fulgur::program {

// factor * symbol + offset: the size of a dimension that was exported as Dim("n") has the factor 1 and the offset 0,
// and of one that was exported as 2 * Dim("n") + 1 it has 2 and 1.
struct SymbolicSize {
  std::string symbol;  // "s77"
  int64_t factor = 1, offset = 0;
};

// Reads what sympy.srepr() writes of a linear expression of one symbol:
//   Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(1))
// Gives nothing for any other expression, and for numbers that no size has.
std::optional<SymbolicSize> parse_size_expression(std::string_view text);

}  // namespace fulgur::program
