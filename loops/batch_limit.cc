#include "fulgur/loops/batch_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

template <class Number>
std::optional<Number> parse(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size() && !text.empty() ? std::optional(number)
                                                                                   : std::nullopt;
}

// "10" or "10%"; nullopt for anything else.
std::optional<std::variant<Batches, Fraction>> parse_amount(std::string_view text) {
  if (text.ends_with('%')) {
    if (const auto percent = parse<double>(text.substr(0, text.size() - 1))) return Fraction(*percent / 100);
  } else if (const auto count = parse<int64_t>(text)) {
    return Batches(*count);
  }
  return std::nullopt;
}

void check_amount(std::string_view option, const Batches& amount) {
  if (amount.count >= 0) return;
  throw UsageError(fmt::format("{} must be a number of batches of at least 0, or a Fraction between 0 and 1; got {}",
                               option, amount.count));
}

void check_amount(std::string_view option, const Fraction& amount) {
  if (amount.value >= 0.0 && amount.value <= 1.0) return;
  throw UsageError(
      fmt::format("{} must be a Fraction between 0 and 1, or a number of Batches; got {}", option, amount.value));
}

// The smallest fraction that is at least one of `num_batches` batches, in few digits: rounded up, because 0.3333 of 3
// batches is none.
double smallest_fraction(int64_t num_batches) {
  const auto n = static_cast<double>(num_batches);
  const double scale = std::pow(10.0, 3 + std::ceil(std::log10(n)));
  return std::ceil(scale / n) / scale;
}

std::string text_of(const Batches& amount) { return fmt::format("{}", amount.count); }
std::string text_of(const Fraction& amount) { return fmt::format("{}%", amount.value * 100); }

}  // namespace

TimeSpan::TimeSpan(std::string_view text) : seconds_(0) {
  constexpr std::array<double, 4> kSeconds{86400, 3600, 60, 1};
  std::string_view rest = text;
  size_t part = 0;
  for (; part < kSeconds.size(); ++part) {
    const size_t end = std::min(rest.find(':'), rest.size());
    const std::string_view digits = rest.substr(0, end);
    const bool is_seconds = part + 1 == kSeconds.size();
    const auto number = parse<double>(digits);
    if (!number || digits.find_first_not_of(is_seconds ? "0123456789." : "0123456789") != digits.npos) break;
    seconds_ += std::chrono::duration<double>(*number * kSeconds[part]);
    if (end == rest.size()) {
      rest = {};
      ++part;
      break;
    }
    rest.remove_prefix(end + 1);
  }
  if (part != kSeconds.size() || !rest.empty()) {
    throw UsageError(fmt::format("'{}' is not a time span; write DD:HH:MM:SS, such as 00:12:00:00 for 12 hours", text));
  }
}

std::string TimeSpan::to_string() const {
  const int64_t microseconds = std::llround(seconds_.count() * 1e6), total = microseconds / 1'000'000;
  std::string text =
      fmt::format("{:02}:{:02}:{:02}:{:02}", total / 86400, total / 3600 % 24, total / 60 % 60, total % 60);
  if (const int64_t part = microseconds % 1'000'000; part != 0) {
    text += fmt::format(".{:06}", part);
    text.erase(text.find_last_not_of('0') + 1);
  }
  return text;
}

BatchLimit::BatchLimit(std::string_view text) {
  const auto amount = parse_amount(text);
  if (!amount) {
    throw UsageError(fmt::format("'{}' is not a number of batches (10) nor a part of the epoch (10%)", text));
  }
  limit_ = *amount;
}

void BatchLimit::check(std::string_view option) const {
  std::visit([&](const auto& amount) { check_amount(option, amount); }, limit_);
}

std::optional<int64_t> BatchLimit::of(std::optional<int64_t> num_batches, std::string_view option) const {
  if (const auto* batches = std::get_if<Batches>(&limit_)) {
    return num_batches ? std::min(*num_batches, batches->count) : batches->count;
  }
  const double fraction = std::get<Fraction>(limit_).value;
  if (fraction == 1.0 || fraction == 0.0) return fraction == 1.0 ? num_batches : 0;
  if (!num_batches) {
    throw SetupError(
        fmt::format("{} = Fraction({}), but the loader does not know its length; write a number of Batches, or "
                    "Fraction(1.0) for all",
                    option, fraction));
  }
  const auto count = static_cast<int64_t>(static_cast<double>(*num_batches) * fraction);
  if (count == 0 && *num_batches > 0) {
    throw SetupError(
        fmt::format("{} = Fraction({}) of {} batches is less than one; write Batches(1), or at least "
                    "Fraction({})",
                    option, fraction, *num_batches, smallest_fraction(*num_batches)));
  }
  return count;
}

std::optional<int64_t> BatchLimit::estimate_of(std::optional<int64_t> num_batches) const {
  const auto* fraction = std::get_if<Fraction>(&limit_);
  const bool is_part = fraction != nullptr && fraction->value > 0.0 && fraction->value < 1.0;
  if (!is_part) return of(num_batches, "");
  if (!num_batches) return std::nullopt;
  return std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(*num_batches) * fraction->value));
}

bool BatchLimit::is_zero() const {
  if (const auto* batches = std::get_if<Batches>(&limit_)) return batches->count == 0;
  return std::get<Fraction>(limit_).value == 0.0;
}

std::string BatchLimit::to_string() const {
  return std::visit([](const auto& amount) { return text_of(amount); }, limit_);
}

ValidationInterval::ValidationInterval(std::string_view text) {
  if (text.find(':') != std::string_view::npos) {
    interval_ = TimeSpan(text);
  } else if (const auto amount = parse_amount(text)) {
    std::visit([&](const auto& value) { interval_ = value; }, *amount);
  } else {
    throw UsageError(
        fmt::format("'{}' is not a number of batches (100), a part of the epoch (50%) nor a time span "
                    "(DD:HH:MM:SS)",
                    text));
  }
}

void ValidationInterval::check(std::string_view option) const {
  if (const auto* batches = std::get_if<Batches>(&interval_)) {
    if (batches->count < 1)
      throw UsageError(fmt::format("{} must be at least 1 batch; got {}", option, batches->count));
  } else if (const auto* fraction = std::get_if<Fraction>(&interval_)) {
    check_amount(option, *fraction);
    if (fraction->value == 0.0)
      throw UsageError(fmt::format("{} must be above 0; leave the val loader out instead", option));
  } else if (!(std::get<TimeSpan>(interval_).seconds().count() > 0)) {
    throw UsageError(fmt::format("{} must be longer than no time", option));
  }
}

std::string ValidationInterval::to_string() const {
  if (const auto* span = std::get_if<TimeSpan>(&interval_)) return span->to_string();
  if (const auto* fraction = std::get_if<Fraction>(&interval_)) return text_of(*fraction);
  return text_of(std::get<Batches>(interval_));
}

}  // namespace fulgur
