#include "fulgur/programs/size_arithmetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/testing/errors.h"

// The expected results are Python's.
namespace fulgur::program {
namespace {

using c10::IValue;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max(), kMin = std::numeric_limits<int64_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

IValue call(const std::string& name, std::vector<IValue> arguments) {
  const SizeFunction* function = find_size_arithmetic(name);
  if (function == nullptr) throw std::out_of_range(name);
  EXPECT_EQ(function->num_arguments, arguments.size()) << name;
  torch::jit::Stack stack{"what is below stays"};
  stack.insert(stack.end(), arguments.begin(), arguments.end());
  function->call(stack);
  EXPECT_EQ(stack.size(), 2u) << name;
  return stack.back();
}

// The result as Python prints it: a fraction has a point or is nan or inf.
std::string text(const IValue& value) {
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isInt()) return std::to_string(value.toInt());
  if (!value.isDouble()) return value.tagKind();
  const double number = value.toDouble();
  if (std::isnan(number)) return "nan";
  std::string digits(32, '\0');
  digits.resize(static_cast<size_t>(std::snprintf(digits.data(), digits.size(), "%.17g", number)));
  return digits.find_first_of(".ein") == digits.npos ? digits + ".0" : digits;
}

std::string of(const std::string& name, std::vector<IValue> arguments) {
  return text(call(name, std::move(arguments)));
}

std::string refusal(const std::string& name, std::vector<IValue> arguments) {
  const std::string message = testing::message_of<c10::ValueError>([&] { call(name, arguments); });
  return message.substr(0, message.find('\n'));
}

TEST(SizeArithmetic, DivisionRoundsDownAndTheRemainderHasTheSignOfTheDivisor) {
  EXPECT_EQ(of("_operator.floordiv", {7, 2}), "3");
  EXPECT_EQ(of("_operator.floordiv", {-7, 2}), "-4");
  EXPECT_EQ(of("_operator.floordiv", {7, -2}), "-4");
  EXPECT_EQ(of("_operator.floordiv", {-7, -2}), "3");
  EXPECT_EQ(of("_operator.floordiv", {-6, 2}), "-3");
  EXPECT_EQ(of("_operator.floordiv", {kMin, 1}), std::to_string(kMin));
  EXPECT_EQ(of("_operator.mod", {7, 3}), "1");
  EXPECT_EQ(of("_operator.mod", {-7, 3}), "2");
  EXPECT_EQ(of("_operator.mod", {7, -3}), "-2");
  EXPECT_EQ(of("_operator.mod", {-7, -3}), "-1");
  EXPECT_EQ(of("_operator.mod", {-6, 3}), "0");
  EXPECT_EQ(of("_operator.mod", {kMin, -1}), "0");
  EXPECT_EQ(of("_operator.mod", {kMin, kMax}), std::to_string(kMax - 1));
  EXPECT_EQ(of("_operator.truediv", {7, 2}), "3.5");
  EXPECT_EQ(of("_operator.truediv", {6, 2}), "3.0");
}

TEST(SizeArithmetic, FractionsAreDividedAsPythonDoes) {
  EXPECT_EQ(of("_operator.floordiv", {7.5, 2}), "3.0");
  EXPECT_EQ(of("_operator.floordiv", {-7.5, 2}), "-4.0");
  EXPECT_EQ(of("_operator.floordiv", {1.0, 0.1}), "9.0");  // 1.0 / 0.1 is rounded to 10.0
  EXPECT_EQ(of("_operator.floordiv", {-1.0, kInf}), "-1.0");
  EXPECT_EQ(of("_operator.floordiv", {-0.0, 5}), "-0.0");
  EXPECT_EQ(of("_operator.floordiv", {kInf, 5}), "nan");
  EXPECT_EQ(of("_operator.mod", {1.0, 0.1}), "0.09999999999999995");
  EXPECT_EQ(of("_operator.mod", {-7.5, 2}), "0.5");
  EXPECT_EQ(of("_operator.mod", {7.5, -2}), "-0.5");
  EXPECT_EQ(of("_operator.mod", {-1.0, kInf}), "inf");
  EXPECT_EQ(of("_operator.mod", {0.0, -5}), "-0.0");
}

TEST(SizeArithmetic, AFlagCountsAsOneAndAFractionMakesAFraction) {
  EXPECT_EQ(of("_operator.add", {true, true}), "2");
  EXPECT_EQ(of("_operator.mul", {3, true}), "3");
  EXPECT_EQ(of("_operator.sub", {false, 2}), "-2");
  EXPECT_EQ(of("_operator.add", {1, 0.5}), "1.5");
  EXPECT_EQ(of("_operator.mul", {2, 1.0}), "2.0");
  EXPECT_EQ(of("_operator.sub", {true, 0.25}), "0.75");
  EXPECT_EQ(of("_operator.neg", {true}), "-1");
  EXPECT_EQ(of("_operator.pos", {true}), "1");
  EXPECT_EQ(of("_operator.pos", {-1.5}), "-1.5");
  EXPECT_EQ(of("torch.sym_int", {true}), "1");
  EXPECT_EQ(of("torch.sym_int", {-1.9}), "-1");
  EXPECT_EQ(of("math.trunc", {1.9}), "1");
  EXPECT_EQ(of("torch.sym_float", {3}), "3.0");
  EXPECT_EQ(of("torch.sym_max", {1, 0.5}), "1.0");  // other than max() of Python
  EXPECT_EQ(of("torch.sym_max", {3, -4}), "3");
  EXPECT_EQ(of("torch.sym_min", {3, -4}), "-4");
  EXPECT_EQ(of("torch.sym_min", {kNan, 1}), "nan");
  EXPECT_EQ(of("torch.sym_min", {1, kNan}), "1.0");
}

TEST(SizeArithmetic, PowersRootsAndShifts) {
  EXPECT_EQ(of("_operator.pow", {2, 10}), "1024");
  EXPECT_EQ(of("_operator.pow", {-2, 63}), std::to_string(kMin));
  EXPECT_EQ(of("_operator.pow", {2, -1}), "0.5");
  EXPECT_EQ(of("_operator.pow", {0, 0}), "1");
  EXPECT_EQ(of("_operator.pow", {0, kMax}), "0");
  EXPECT_EQ(of("_operator.pow", {1, kMax}), "1");
  EXPECT_EQ(of("_operator.pow", {-1, kMax}), "-1");
  EXPECT_EQ(of("_operator.pow", {4, 0.5}), "2.0");
  EXPECT_EQ(of("torch._sym_sqrt", {9}), "3.0");
  EXPECT_EQ(of("_operator.lshift", {3, 4}), "48");
  EXPECT_EQ(of("_operator.lshift", {-1, 62}), std::to_string(kMin / 2));
  EXPECT_EQ(of("_operator.lshift", {true, true}), "2");
  EXPECT_EQ(of("_operator.rshift", {-5, 1}), "-3");
  EXPECT_EQ(of("_operator.rshift", {-5, kMax}), "-1");
}

TEST(SizeArithmetic, ComparesAndChooses) {
  EXPECT_EQ(of("_operator.eq", {1, true}), "True");
  EXPECT_EQ(of("_operator.eq", {1, 1.0}), "True");
  EXPECT_EQ(of("_operator.ne", {kNan, kNan}), "True");
  EXPECT_EQ(of("_operator.lt", {kMax - 1, kMax}), "True");
  EXPECT_EQ(of("_operator.le", {2, 1.5}), "False");
  EXPECT_EQ(of("_operator.gt", {2, 1.5}), "True");
  EXPECT_EQ(of("_operator.ge", {-1, -1}), "True");
  EXPECT_EQ(of("_operator.and_", {true, false}), "False");
  EXPECT_EQ(of("_operator.and_", {6, 3}), "2");
  EXPECT_EQ(of("_operator.or_", {true, 2}), "3");
  EXPECT_EQ(of("torch.sym_not", {0}), "True");
  EXPECT_EQ(of("torch.sym_not", {0.5}), "False");
  EXPECT_EQ(of("torch.sym_ite", {true, 1, 2}), "1");
  EXPECT_EQ(of("torch.sym_ite", {false, 1, 2}), "2");
}

TEST(SizeArithmetic, RefusesWhatDoesNotFitInto64Bits) {
  const std::string reason = "a size that the program computes does not fit into 64 bits";
  for (const auto& [name, arguments] :
       std::vector<std::pair<std::string, std::vector<IValue>>>{{"_operator.add", {kMax, 1}},
                                                                {"_operator.sub", {kMin, true}},
                                                                {"_operator.mul", {kMax, 2}},
                                                                {"_operator.floordiv", {kMin, -1}},
                                                                {"_operator.pow", {2, 63}},
                                                                {"_operator.pow", {10.0, 400}},
                                                                {"_operator.lshift", {1, 63}},
                                                                {"_operator.neg", {kMin}},
                                                                {"math.trunc", {9223372036854775808.0}},
                                                                {"torch.sym_int", {kInf}},
                                                                {"torch.sym_int", {kNan}}}) {
    EXPECT_EQ(refusal(name, arguments), reason) << name;
  }
  EXPECT_EQ(of("math.trunc", {-9223372036854775808.0}), std::to_string(kMin));
}

TEST(SizeArithmetic, RefusesWherePythonRaises) {
  for (const std::string name : {"_operator.floordiv", "_operator.mod", "_operator.truediv"}) {
    for (const IValue& zero : {IValue(0), IValue(0.0), IValue(false)}) {
      EXPECT_EQ(refusal(name, {1, zero}), "the program divides a size by zero") << name;
      EXPECT_EQ(refusal(name, {1.5, zero}), "the program divides a size by zero") << name;
    }
  }
  EXPECT_EQ(refusal("_operator.pow", {0, -1}), "the program divides a size by zero");
  EXPECT_EQ(refusal("_operator.pow", {-8, 0.5}), "the program takes the root of -8, whose result is a complex number");
  EXPECT_EQ(refusal("torch._sym_sqrt", {-1}), "the program takes the root of -1");
  EXPECT_EQ(refusal("_operator.lshift", {1, -1}), "the program shifts a size by -1 bits");
  EXPECT_EQ(refusal("_operator.rshift", {1, -1}), "the program shifts a size by -1 bits");
  EXPECT_EQ(refusal("_operator.and_", {1.5, 1}), "the program computes a size from a Double");
  EXPECT_EQ(refusal("_operator.add", {"a", 1}), "the program computes a size from a String");
  EXPECT_EQ(refusal("_operator.add", {1, IValue()}), "the program computes a size from a None");
}

TEST(SizeArithmetic, KnowsNoOtherFunctions) {
  EXPECT_EQ(find_size_arithmetic("_operator.matmul"), nullptr);
  EXPECT_EQ(find_size_arithmetic("os.system"), nullptr);
}

}  // namespace
}  // namespace fulgur::program
