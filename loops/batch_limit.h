#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

namespace fulgur {

// A number of batches. It is another type than Fraction, so that 1 batch and 1.0 epochs cannot be confused.
struct Batches {
  int64_t count;
  explicit constexpr Batches(int64_t given) : count(given) {}
  bool operator==(const Batches&) const = default;
};

// A part of an epoch, from 0 to 1.
struct Fraction {
  double value;
  explicit constexpr Fraction(double given) : value(given) {}
  bool operator==(const Fraction&) const = default;
};

// A time span, from any std::chrono duration or from "DD:HH:MM:SS", days first.
class TimeSpan {
 public:
  template <class Rep, class Period>
  TimeSpan(std::chrono::duration<Rep, Period> span)  // NOLINT: implicit, as is the next
      : seconds_(span) {}
  TimeSpan(std::string_view text);  // throws UsageError that shows the format
  TimeSpan(const char* text) : TimeSpan(std::string_view(text)) {}
  std::chrono::duration<double> seconds() const { return seconds_; }
  std::string to_string() const;  // DD:HH:MM:SS, with as many decimals as a microsecond needs

 private:
  std::chrono::duration<double> seconds_;
};

// How much of an epoch is run: `.limit_train_batches = Batches(10)`, or `Fraction(0.1)`. As text, for a flag: 10
// batches, or 10% of the epoch.
class BatchLimit {
 public:
  BatchLimit() = default;                       // the whole epoch
  BatchLimit(Batches limit) : limit_(limit) {}  // NOLINT: implicit, as is the next
  BatchLimit(Fraction limit) : limit_(limit) {}
  explicit BatchLimit(std::string_view text);  // throws UsageError

  // Throws UsageError if a count is negative or a fraction not in [0, 1]; `option` begins the message.
  void check(std::string_view option) const;

  // The number of batches to run of an epoch with `num_batches` batches (nullopt: unknown; then the result may be
  // nullopt, too). Throws SetupError for a fraction of an unknown number, or of so few batches that none would be
  // left.
  std::optional<int64_t> of(std::optional<int64_t> num_batches, std::string_view option) const;

  // Like of(), for an estimate that must not fail: nullopt for a fraction of an unknown number, and at least one batch.
  std::optional<int64_t> estimate_of(std::optional<int64_t> num_batches) const;

  bool is_zero() const;  // no batch is run
  std::string to_string() const;

 private:
  std::variant<Batches, Fraction> limit_ = Fraction(1.0);
};

// When fit validates: after a part of the epoch, a number of batches, or a time. As text: 50%, 100, or 00:01:00:00.
class ValidationInterval {
 public:
  ValidationInterval() = default;                                // at the end of the epoch
  ValidationInterval(Batches interval) : interval_(interval) {}  // NOLINT: implicit, as are the next three
  ValidationInterval(Fraction interval) : interval_(interval) {}
  ValidationInterval(TimeSpan interval) : interval_(interval) {}
  template <class Rep, class Period>
  ValidationInterval(std::chrono::duration<Rep, Period> interval) : interval_(TimeSpan(interval)) {}
  explicit ValidationInterval(std::string_view text);  // throws UsageError

  void check(std::string_view option) const;  // throws UsageError
  const std::variant<Batches, Fraction, TimeSpan>& value() const { return interval_; }
  std::string to_string() const;

 private:
  std::variant<Batches, Fraction, TimeSpan> interval_ = Fraction(1.0);
};

}  // namespace fulgur
