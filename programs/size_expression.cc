#include "fulgur/programs/size_expression.h"

#include <charconv>
#include <cstdint>
#include <string>

namespace fulgur::program {
namespace {

class SizeExpression {
 public:
  explicit SizeExpression(std::string_view text) : text_(text) {}

  std::optional<SymbolicSize> parse() {
    constexpr int64_t kMost = int64_t{1} << 40;
    std::optional<SymbolicSize> size = term();
    if (!size || !text_.empty() || size->symbol.empty()) return {};
    const bool is_plausible = 0 < size->factor && size->factor < kMost && -kMost < size->offset && size->offset < kMost;
    return is_plausible ? size : std::nullopt;
  }

 private:
  static constexpr int kMaxDepth = 8;

  std::optional<SymbolicSize> term() {
    if (take("Integer(")) return number();
    if (take("Symbol('")) return symbol();
    if (depth_ == kMaxDepth) return {};
    ++depth_;
    std::optional<SymbolicSize> result;
    if (take("Add(")) {
      result = operands(add);
    } else if (take("Mul(")) {
      result = operands(multiply);
    }
    --depth_;
    return result;
  }

  std::optional<SymbolicSize> operands(std::optional<SymbolicSize> (*combine)(const SymbolicSize&,
                                                                              const SymbolicSize&)) {
    std::optional<SymbolicSize> all = term();
    while (all && take(", ")) {
      const std::optional<SymbolicSize> next = term();
      all = next ? combine(*all, *next) : std::nullopt;
    }
    return take(")") ? all : std::nullopt;
  }

  static std::optional<SymbolicSize> add(const SymbolicSize& a, const SymbolicSize& b) {
    if (!a.symbol.empty() && !b.symbol.empty()) return {};
    const SymbolicSize& symbolic = a.symbol.empty() ? b : a;
    SymbolicSize sum{.symbol = symbolic.symbol, .factor = symbolic.factor};
    return __builtin_add_overflow(a.offset, b.offset, &sum.offset) ? std::nullopt : std::optional(sum);
  }

  static std::optional<SymbolicSize> multiply(const SymbolicSize& a, const SymbolicSize& b) {
    if (!a.symbol.empty() && !b.symbol.empty()) return {};
    const SymbolicSize& symbolic = a.symbol.empty() ? b : a;
    const int64_t number = a.symbol.empty() ? a.offset : b.offset;
    SymbolicSize product{.symbol = symbolic.symbol};
    const bool overflows = __builtin_mul_overflow(symbolic.factor, number, &product.factor) ||
                           __builtin_mul_overflow(symbolic.offset, number, &product.offset);
    return overflows ? std::nullopt : std::optional(product);
  }

  std::optional<SymbolicSize> number() {
    SymbolicSize number{.symbol = "", .factor = 0};
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), number.offset);
    if (error != std::errc()) return {};
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return take(")") ? std::optional(number) : std::nullopt;
  }

  std::optional<SymbolicSize> symbol() {
    const size_t quote = text_.find('\''), end = text_.find(')');
    if (quote == 0 || quote == text_.npos || end == text_.npos || end < quote) return {};
    SymbolicSize symbol{.symbol = std::string(text_.substr(0, quote))};
    text_.remove_prefix(end + 1);
    return symbol;
  }

  bool take(std::string_view token) {
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }

  std::string_view text_;  // what is left of it
  int depth_ = 0;
};

}  // namespace

std::optional<SymbolicSize> parse_size_expression(std::string_view text) { return SizeExpression(text).parse(); }

}  // namespace fulgur::program
