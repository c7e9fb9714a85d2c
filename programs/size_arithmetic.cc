#include "fulgur/programs/size_arithmetic.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <unordered_map>

namespace fulgur::program {
namespace {

using c10::IValue;
using torch::jit::pop;
using torch::jit::Stack;

bool is_fraction(const IValue& value) { return value.isDouble(); }

double to_double(const IValue& value) {
  if (value.isDouble()) return value.toDouble();
  return value.isBool() ? static_cast<double>(value.toBool()) : static_cast<double>(value.toInt());
}

int64_t to_int(const IValue& value) { return value.isBool() ? static_cast<int64_t>(value.toBool()) : value.toInt(); }

bool is_true(const IValue& value) { return is_fraction(value) ? value.toDouble() != 0 : to_int(value) != 0; }

int64_t checked(bool overflows, int64_t result) {
  TORCH_CHECK_VALUE(!overflows, "a size computed by the program does not fit into 64 bits");
  return result;
}

int64_t sum(int64_t a, int64_t b) {
  int64_t result = 0;
  const bool overflows = __builtin_add_overflow(a, b, &result);
  return checked(overflows, result);
}

int64_t difference(int64_t a, int64_t b) {
  int64_t result = 0;
  const bool overflows = __builtin_sub_overflow(a, b, &result);
  return checked(overflows, result);
}

int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  const bool overflows = __builtin_mul_overflow(a, b, &result);
  return checked(overflows, result);
}

int64_t floor_division(int64_t a, int64_t b) {
  TORCH_CHECK_VALUE(b != 0, "the program divides a size by zero");
  const bool overflows = b == -1 && a == std::numeric_limits<int64_t>::min();
  if (overflows) checked(true, 0);
  return a / b - static_cast<int64_t>(a % b != 0 && (a < 0) != (b < 0));
}

double floor_division(double a, double b) {
  TORCH_CHECK_VALUE(b != 0, "the program divides a size by zero");
  return std::floor(a / b);
}

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (int64_t i = 0; i < exponent && result != 0; ++i) {
    result = product(result, base);
    if (base == 1) break;
    if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  }
  return result;
}

// A function of two numbers: whole numbers, unless one of them is a fraction.
template <auto kWhole, auto kFraction>
void binary(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  if (is_fraction(a) || is_fraction(b)) {
    stack.emplace_back(kFraction(to_double(a), to_double(b)));
  } else {
    stack.emplace_back(kWhole(to_int(a), to_int(b)));
  }
}

template <auto kFunction>
void unary(Stack& stack) {
  stack.emplace_back(kFunction(pop(stack)));
}

template <class Compare>
void compare(Stack& stack) {
  binary<[](int64_t a, int64_t b) { return Compare()(a, b); }, [](double a, double b) { return Compare()(a, b); }>(
      stack);
}

void true_division(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  TORCH_CHECK_VALUE(to_double(b) != 0, "the program divides a size by zero");
  stack.emplace_back(to_double(a) / to_double(b));
}

void to_the_power(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  if (is_fraction(a) || is_fraction(b) || to_int(b) < 0) {
    stack.emplace_back(std::pow(to_double(a), to_double(b)));
  } else {
    stack.emplace_back(power(to_int(a), to_int(b)));
  }
}

// Of several numbers; the result keeps the type of the argument that it is.
template <bool kGreatest>
void extreme(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  const bool takes_b = kGreatest ? to_double(b) > to_double(a) : to_double(b) < to_double(a);
  stack.push_back(takes_b ? b : a);
}

void choose(Stack& stack) {  // sym_ite(condition, if_true, if_false)
  const IValue otherwise = pop(stack), then = pop(stack), condition = pop(stack);
  stack.push_back(is_true(condition) ? then : otherwise);
}

// Python's `and` on flags, and bit by bit on whole numbers.
template <auto kFunction>
void bitwise(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  const int64_t result = kFunction(to_int(a), to_int(b));
  if (a.isBool() && b.isBool()) {
    stack.emplace_back(result != 0);
  } else {
    stack.emplace_back(result);
  }
}

IValue negative(const IValue& a) {
  if (is_fraction(a)) return -a.toDouble();
  return difference(0, to_int(a));
}

IValue truncated(const IValue& a) {
  if (!is_fraction(a)) return to_int(a);
  const double whole = std::trunc(a.toDouble());
  TORCH_CHECK_VALUE(std::abs(whole) < 9.2e18, "a size computed by the program does not fit into 64 bits");
  return static_cast<int64_t>(whole);
}

const std::unordered_map<std::string_view, StackFunction>& functions() {
  static const std::unordered_map<std::string_view, StackFunction> all{
      {"_operator.add", binary<sum, [](double a, double b) { return a + b; }>},
      {"_operator.sub", binary<difference, [](double a, double b) { return a - b; }>},
      {"_operator.mul", binary<product, [](double a, double b) { return a * b; }>},
      {"_operator.floordiv", binary<[](int64_t a, int64_t b) { return floor_division(a, b); },
                                    [](double a, double b) { return floor_division(a, b); }>},
      {"_operator.mod", binary<[](int64_t a, int64_t b) { return a - floor_division(a, b) * b; },
                               [](double a, double b) { return a - floor_division(a, b) * b; }>},
      {"_operator.truediv", true_division},
      {"_operator.pow", to_the_power},
      {"_operator.eq", compare<std::equal_to<>>},
      {"_operator.ne", compare<std::not_equal_to<>>},
      {"_operator.lt", compare<std::less<>>},
      {"_operator.le", compare<std::less_equal<>>},
      {"_operator.gt", compare<std::greater<>>},
      {"_operator.ge", compare<std::greater_equal<>>},
      {"_operator.and_", bitwise<[](int64_t a, int64_t b) { return a & b; }>},
      {"_operator.or_", bitwise<[](int64_t a, int64_t b) { return a | b; }>},
      {"_operator.neg", unary<negative>},
      {"_operator.pos", unary<[](const IValue& a) { return a; }>},
      {"math.trunc", unary<truncated>},
      {"torch.sym_int", unary<truncated>},
      {"torch.sym_float", unary<[](const IValue& a) { return IValue(to_double(a)); }>},
      {"torch.sym_not", unary<[](const IValue& a) { return IValue(!is_true(a)); }>},
      {"torch.sym_max", extreme<true>},
      {"torch.sym_min", extreme<false>},
      {"torch.sym_ite", choose},
      {"torch._sym_sqrt", unary<[](const IValue& a) { return IValue(std::sqrt(to_double(a))); }>}};
  return all;
}

}  // namespace

StackFunction find_size_arithmetic(std::string_view target) {
  const auto found = functions().find(target);
  return found == functions().end() ? nullptr : found->second;
}

}  // namespace fulgur::program
