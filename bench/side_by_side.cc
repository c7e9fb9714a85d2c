#include "bench/side_by_side.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace fulgur::bench {
namespace {

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::vector<Timing> side_by_side(const std::string& unit, double units, const std::vector<Contender>& contenders,
                                 int rounds) {
  std::vector<std::vector<double>> times(contenders.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const double time = seconds_of(contenders[i].run);
      if (round >= 0) times[i].push_back(time / units);
    }
  }
  std::vector<Timing> timings;
  for (size_t i = 0; i < contenders.size(); ++i) {
    timings.push_back({.seconds = median(times[i]), .ratio = 1, .rounds = times[i]});
    const Ratio ratio = ratio_of(timings[i], timings[0]);
    timings[i].ratio = ratio.median;
    const double bytes = contenders[i].bytes_per_unit;
    fmt::print("{:<40} {:>9.2f} us/{}   ratio {:.3f}   (rounds: {:.3f} .. {:.3f}){}\n", contenders[i].name,
               timings[i].seconds * 1e6, unit, ratio.median, ratio.least, ratio.most,
               bytes > 0 ? fmt::format("   {:.1f} GB/s", bytes / timings[i].seconds * 1e-9) : "");
  }
  return timings;
}

Ratio ratio_of(const Timing& timing, const Timing& base) {
  std::vector<double> ratios;
  for (size_t round = 0; round < timing.rounds.size(); ++round)
    ratios.push_back(timing.rounds[round] / base.rounds[round]);
  return {median(ratios), *std::ranges::min_element(ratios), *std::ranges::max_element(ratios)};
}

}  // namespace fulgur::bench
