#include "fulgur/trainer/simple_profiler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <sstream>
#include <utility>

namespace fulgur {
namespace {

double seconds(trace::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// "12.3 us", "4.56 ms", "7.89 s"
std::string short_time(double time_s) {
  if (time_s < 1e-3) return fmt::format("{:.3g} us", time_s * 1e6);
  if (time_s < 1.0) return fmt::format("{:.3g} ms", time_s * 1e3);
  return fmt::format("{:.2f} s", time_s);
}

// One action over all ranks.
struct Row {
  int64_t calls = 0;
  double total_s = 0.0;
  double longest_s = -1.0;
  size_t slowest = 0;  // rank
};

std::map<std::string, Row> rows_of(const std::vector<trace::Profile::Sums>& by_rank) {
  std::map<std::string, Row> rows;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& [name, sum] : by_rank[rank]) {
      Row& row = rows[name];
      const double total_s = seconds(sum.total);
      row.calls += sum.calls;
      row.total_s += total_s;
      if (total_s <= row.longest_s) continue;
      row.longest_s = total_s;
      row.slowest = rank;
    }
  }
  return rows;
}

}  // namespace

std::string sums_to_text(const trace::Profile::Sums& sums) {
  std::string text;
  for (const auto& [name, sum] : sums) text += fmt::format("{} {} {}\n", sum.calls, sum.total.count(), name);
  return text;
}

trace::Profile::Sums sums_from_text(std::string_view text) {
  trace::Profile::Sums sums;
  std::istringstream lines{std::string(text)};
  int64_t calls = 0, ticks = 0;
  std::string name;
  while (lines >> calls >> ticks && std::getline(lines >> std::ws, name)) {
    sums[name] = {.calls = calls, .total = trace::Clock::duration(ticks)};
  }
  return sums;
}

std::string profile_table(const std::vector<trace::Profile::Sums>& by_rank, std::string_view whole,
                          double least_share) {
  const auto num_ranks = static_cast<double>(by_rank.size());
  const std::map<std::string, Row> by_name = rows_of(by_rank);
  std::vector<std::pair<std::string, Row>> rows(by_name.begin(), by_name.end());
  std::ranges::stable_sort(rows, std::ranges::greater(), [](const auto& row) { return row.second.total_s; });
  const double all_s = by_name.at(std::string(whole)).total_s;
  const bool has_ranks = by_rank.size() > 1;
  std::string table = fmt::format("{:>7} {:>10} {:>10} {:>10}  {}what\n", "share", "calls", "mean", "total",
                                  has_ranks ? "slowest rank  " : "");
  for (const auto& [name, row] : rows) {
    const double share = row.total_s / all_s;
    if (share < least_share) continue;
    const std::string slowest =
        has_ranks
            ? fmt::format("{:<14}", fmt::format("{}: x{:.2f}", row.slowest, row.longest_s * num_ranks / row.total_s))
            : "";
    table += fmt::format(
        "{:>6.1f}% {:>10.0f} {:>10} {:>10}  {}{}\n", 100 * share, static_cast<double>(row.calls) / num_ranks,
        short_time(row.total_s / static_cast<double>(row.calls)), short_time(row.total_s / num_ranks), slowest, name);
  }
  return table;
}

}  // namespace fulgur
