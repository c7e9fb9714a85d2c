#include "fulgur/programs/size_guard.h"

#include <charconv>
#include <system_error>
#include <utility>

namespace fulgur::program {
namespace {

using Value = std::optional<int64_t>;

Value add(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? std::nullopt : Value(result);
}
Value subtract(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_sub_overflow(a, b, &result) ? std::nullopt : Value(result);
}
Value multiply(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::nullopt : Value(result);
}

// Python rounds down, and the remainder has the sign of the divisor. Divisors below 1 are no sizes.
Value remainder(int64_t a, int64_t b) { return b < 1 ? std::nullopt : Value((a % b + b) % b); }
Value divide(int64_t a, int64_t b) { return b < 1 ? std::nullopt : Value(a / b - (a % b < 0 ? 1 : 0)); }

}  // namespace

// A parser by recursive descent, of the operators in Python's order.
class SizeGuardParser {
 public:
  using Term = SizeGuard::Term;

  explicit SizeGuardParser(std::string_view text) : text_(text) { guard_.text_ = text; }

  std::optional<SizeGuard> parse() {
    guard_.condition_ = disjunction();
    skip_spaces();
    if (!guard_.condition_ || !text_.empty() || guard_.sizes_.empty()) return {};
    return std::move(guard_);
  }

 private:
  static constexpr int kMaxDepth = 64;

  Term disjunction() {
    Term left = conjunction();
    while (left && take_word("or")) {
      Term right = conjunction();
      if (!right) return {};
      left = [left, right](const std::vector<int64_t>& values) {
        const Value a = left(values);
        return a && *a != 0 ? a : right(values);
      };
    }
    return left;
  }

  Term conjunction() {
    Term left = negation();
    while (left && take_word("and")) {
      Term right = negation();
      if (!right) return {};
      left = [left, right](const std::vector<int64_t>& values) {
        const Value a = left(values);
        return a && *a != 0 ? right(values) : a;
      };
    }
    return left;
  }

  Term negation() {
    if (!take_word("not")) return comparison();
    if (++depth_ > kMaxDepth) return {};
    Term inner = negation();
    --depth_;
    if (!inner) return {};
    return [inner](const std::vector<int64_t>& values) {
      const Value value = inner(values);
      return value ? Value(*value == 0) : value;
    };
  }

  // Two operands alone: a chain such as 2 <= a <= 5 is none of torch's.
  Term comparison() {
    Term left = sum();
    if (!left) return left;
    const auto compare = [&](const auto& function) -> Term {
      return combine(left, sum(), [function](int64_t a, int64_t b) { return Value(function(a, b)); });
    };
    if (take("==")) return compare(std::equal_to<>());
    if (take("!=")) return compare(std::not_equal_to<>());
    if (take("<=")) return compare(std::less_equal<>());
    if (take(">=")) return compare(std::greater_equal<>());
    if (take("<")) return compare(std::less<>());
    if (take(">")) return compare(std::greater<>());
    return left;
  }

  Term sum() {
    Term left = product();
    while (left) {
      if (take("+")) {
        left = combine(left, product(), add);
      } else if (take("-")) {
        left = combine(left, product(), subtract);
      } else {
        break;
      }
    }
    return left;
  }

  Term product() {
    Term left = factor();
    while (left) {
      if (take("//")) {
        left = combine(left, factor(), divide);
      } else if (take("%")) {
        left = combine(left, factor(), remainder);
      } else if (!next_is("**") && take("*")) {
        left = combine(left, factor(), multiply);
      } else {
        break;
      }
    }
    return left;
  }

  Term factor() {
    if (++depth_ > kMaxDepth) return {};
    Term term = one();
    --depth_;
    return term;
  }

  Term one() {
    if (take("-")) return combine(number_of(0), factor(), subtract);
    if (take("(")) {
      Term inner = disjunction();
      return inner && take(")") ? inner : Term();
    }
    if (take("L")) return size();
    const std::optional<int64_t> value = number();
    return value ? number_of(*value) : Term();
  }

  static Term number_of(int64_t number) {
    return [number](const std::vector<int64_t>& /*values*/) { return Value(number); };
  }

  // L['pair']['left'].size()[0]
  Term size() {
    std::string input;
    while (take("[")) {
      const std::optional<std::string> key = this->key();
      if (!key || !take("]")) return {};
      if (!input.empty()) input += '.';
      input += *key;
    }
    if (input.empty() || !take(".size()[")) return {};
    const std::optional<int64_t> dim = number();
    if (!dim || !take("]")) return {};
    guard_.sizes_.push_back({.input = input, .dim = static_cast<size_t>(*dim)});
    return [place = guard_.sizes_.size() - 1](const std::vector<int64_t>& values) { return Value(values.at(place)); };
  }

  std::optional<std::string> key() {
    if (!take("'")) {
      const std::optional<int64_t> place = number();
      return place ? std::optional(std::to_string(*place)) : std::nullopt;
    }
    const size_t end = text_.find('\'');
    if (end == text_.npos || text_.substr(0, end).find('\\') != text_.npos) return {};
    std::string key(text_.substr(0, end));
    text_.remove_prefix(end + 1);
    return key;
  }

  std::optional<int64_t> number() {
    skip_spaces();
    int64_t value = 0;
    if (text_.empty() || text_.front() < '0' || text_.front() > '9') return {};
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    if (error != std::errc()) return {};
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    if (text_.starts_with('.')) return {};  // a number that is not whole
    return value;
  }

  template <class Function>
  static Term combine(Term left, Term right, Function function) {
    if (!left || !right) return {};
    return [left = std::move(left), right = std::move(right), function](const std::vector<int64_t>& values) {
      const Value a = left(values), b = right(values);
      return a && b ? function(*a, *b) : std::nullopt;
    };
  }

  void skip_spaces() {
    while (text_.starts_with(' ')) text_.remove_prefix(1);
  }

  bool next_is(std::string_view token) {
    skip_spaces();
    return text_.starts_with(token);
  }

  bool take(std::string_view token) {
    if (!next_is(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }

  // A word, with a space or a parenthesis after it.
  bool take_word(std::string_view word) {
    if (!next_is(word) || (text_.size() > word.size() && text_[word.size()] != ' ' && text_[word.size()] != '(')) {
      return false;
    }
    text_.remove_prefix(word.size());
    return true;
  }

  std::string_view text_;  // what is left of it
  SizeGuard guard_;
  int depth_ = 0;
};

std::optional<SizeGuard> SizeGuard::parse(std::string_view text) {
  constexpr size_t kMaxLength = 8192;  // so that terms do not lie in each other deeper than the stack allows
  if (text.size() > kMaxLength) return {};
  return SizeGuardParser(text).parse();
}

bool SizeGuard::holds(const std::vector<int64_t>& values) const {
  const Value value = condition_(values);
  return value && *value != 0;
}

}  // namespace fulgur::program
