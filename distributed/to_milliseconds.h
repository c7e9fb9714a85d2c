#pragma once

#include <chrono>
#include <cstdint>

namespace fulgur {

constexpr double kLongestTimeoutS = 1e9;  // 32 years; a clock's time plus as many seconds does not overflow

// The settings of a run are in seconds. A longer time than kLongestTimeoutS counts as that.
inline std::chrono::milliseconds to_milliseconds(double seconds) {
  const double bounded = seconds < kLongestTimeoutS ? seconds : kLongestTimeoutS;
  return std::chrono::milliseconds(static_cast<int64_t>(bounded * 1000));
}

}  // namespace fulgur
