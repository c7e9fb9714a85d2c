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

int64_t to_int(const IValue& value) {
  TORCH_CHECK_VALUE(value.isBool() || value.isInt(), "the program computes a size from a ", value.tagKind());
  return value.isBool() ? static_cast<int64_t>(value.toBool()) : value.toInt();
}

double to_double(const IValue& value) {
  return is_fraction(value) ? value.toDouble() : static_cast<double>(to_int(value));
}

bool is_true(const IValue& value) { return is_fraction(value) ? value.toDouble() != 0 : to_int(value) != 0; }

void check_fits(bool fits) { TORCH_CHECK_VALUE(fits, "a size that the program computes does not fit into 64 bits"); }

void check_divisor(bool is_zero) { TORCH_CHECK_VALUE(!is_zero, "the program divides a size by zero"); }

int64_t checked(bool overflows, int64_t result) {
  check_fits(!overflows);
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

bool have_other_signs(auto a, auto b) { return (a < 0) != (b < 0); }

int64_t floor_division(int64_t a, int64_t b) {
  check_divisor(b == 0);
  if (b == -1) return difference(0, a);
  return a / b - static_cast<int64_t>(a % b != 0 && have_other_signs(a, b));
}

int64_t modulo(int64_t a, int64_t b) {
  check_divisor(b == 0);
  const int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && have_other_signs(rest, b) ? rest + b : rest;
}

// A fraction's remainder is exact, and the quotient follows from it: 1.0 // 0.1 is 9, although 1.0 / 0.1 is 10.
double modulo(double a, double b) {
  check_divisor(b == 0);
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return have_other_signs(rest, b) ? rest + b : rest;
}

double floor_division(double a, double b) {
  check_divisor(b == 0);
  const double rest = std::fmod(a, b);
  const double quotient = (a - rest) / b - static_cast<double>(rest != 0 && have_other_signs(rest, b));
  if (quotient == 0) return std::copysign(0.0, a / b);
  return std::floor(quotient) + static_cast<double>(quotient - std::floor(quotient) > 0.5);
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

double power(double base, double exponent) {
  check_divisor(base == 0 && exponent < 0);
  const double result = std::pow(base, exponent);
  TORCH_CHECK_VALUE(!std::isnan(result) || std::isnan(base) || std::isnan(exponent), "the program takes the root of ",
                    base, ", whose result is a complex number");
  check_fits(std::isfinite(result) || !std::isfinite(base) || !std::isfinite(exponent));
  return result;
}

int64_t shifted_left(int64_t a, int64_t b) {
  TORCH_CHECK_VALUE(b >= 0, "the program shifts a size by ", b, " bits");
  if (a == 0) return 0;
  check_fits(b <= 62);
  return product(a, int64_t{1} << b);
}

int64_t shifted_right(int64_t a, int64_t b) {
  TORCH_CHECK_VALUE(b >= 0, "the program shifts a size by ", b, " bits");
  return a >> std::min<int64_t>(b, 63);
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
  check_divisor(!is_true(b));
  stack.emplace_back(to_double(a) / to_double(b));
}

void to_the_power(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  if (is_fraction(a) || is_fraction(b) || to_int(b) < 0) {
    stack.emplace_back(power(to_double(a), to_double(b)));
  } else {
    stack.emplace_back(power(to_int(a), to_int(b)));
  }
}

void choose(Stack& stack) {  // sym_ite(condition, if_true, if_false)
  const IValue otherwise = pop(stack), then = pop(stack), condition = pop(stack);
  stack.push_back(is_true(condition) ? then : otherwise);
}

// Works on whole numbers bit by bit. The result of two flags is one.
template <auto kFunction, bool kKeepsFlags = true>
void bitwise(Stack& stack) {
  const IValue b = pop(stack), a = pop(stack);
  const int64_t result = kFunction(to_int(a), to_int(b));
  if (kKeepsFlags && a.isBool() && b.isBool()) {
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
  constexpr double kBeyond = 9223372036854775808.0;  // 2^63
  const double whole = std::trunc(a.toDouble());
  check_fits(whole >= -kBeyond && whole < kBeyond);
  return static_cast<int64_t>(whole);
}

IValue square_root(const IValue& a) {
  const double number = to_double(a);
  TORCH_CHECK_VALUE(!(number < 0), "the program takes the root of ", number);
  return std::sqrt(number);
}

const std::unordered_map<std::string_view, SizeFunction>& functions() {
  static const std::unordered_map<std::string_view, SizeFunction> all{
      {"_operator.add", {2, binary<sum, [](double a, double b) { return a + b; }>}},
      {"_operator.sub", {2, binary<difference, [](double a, double b) { return a - b; }>}},
      {"_operator.mul", {2, binary<product, [](double a, double b) { return a * b; }>}},
      {"_operator.floordiv",
       {2, binary<[](int64_t a, int64_t b) { return floor_division(a, b); },
                  [](double a, double b) { return floor_division(a, b); }>}},
      {"_operator.mod",
       {2, binary<[](int64_t a, int64_t b) { return modulo(a, b); }, [](double a, double b) { return modulo(a, b); }>}},
      {"_operator.truediv", {2, true_division}},
      {"_operator.pow", {2, to_the_power}},
      {"_operator.lshift", {2, bitwise<shifted_left, false>}},
      {"_operator.rshift", {2, bitwise<shifted_right, false>}},
      {"_operator.eq", {2, compare<std::equal_to<>>}},
      {"_operator.ne", {2, compare<std::not_equal_to<>>}},
      {"_operator.lt", {2, compare<std::less<>>}},
      {"_operator.le", {2, compare<std::less_equal<>>}},
      {"_operator.gt", {2, compare<std::greater<>>}},
      {"_operator.ge", {2, compare<std::greater_equal<>>}},
      {"_operator.and_", {2, bitwise<[](int64_t a, int64_t b) { return a & b; }>}},
      {"_operator.or_", {2, bitwise<[](int64_t a, int64_t b) { return a | b; }>}},
      {"_operator.neg", {1, unary<negative>}},
      {"_operator.pos", {1, unary<[](const IValue& a) { return is_fraction(a) ? a : IValue(to_int(a)); }>}},
      {"math.trunc", {1, unary<truncated>}},
      {"torch.sym_int", {1, unary<truncated>}},
      {"torch.sym_float", {1, unary<[](const IValue& a) { return IValue(to_double(a)); }>}},
      {"torch.sym_not", {1, unary<[](const IValue& a) { return IValue(!is_true(a)); }>}},
      {"torch.sym_max",
       {2, binary<[](int64_t a, int64_t b) { return std::max(a, b); },
                  [](double a, double b) { return std::max(a, b); }>}},
      {"torch.sym_min",
       {2, binary<[](int64_t a, int64_t b) { return std::min(a, b); },
                  [](double a, double b) { return std::min(a, b); }>}},
      {"torch.sym_ite", {3, choose}},
      {"torch._sym_sqrt", {1, unary<square_root>}}};
  return all;
}

}  // namespace

const SizeFunction* find_size_arithmetic(std::string_view target) {
  const auto found = functions().find(target);
  return found == functions().end() ? nullptr : &found->second;
}

}  // namespace fulgur::program
