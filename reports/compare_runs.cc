#include "fulgur/reports/compare_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <string_view>

#include "fulgur/reports/terminal_text.h"

namespace fulgur {
namespace {

bool is_same(const std::optional<double>& a, const std::optional<double>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return *a == *b || (std::isnan(*a) && std::isnan(*b));
}

// Walks two curves by step, with `use` for each place at which one of them has a value or both have. Values at the same
// step correspond in their order.
void for_each_place(std::span<const MetricPoint> a, std::span<const MetricPoint> b, const auto& use) {
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    const int64_t step_a = i < a.size() ? a[i].step : kEnd, step_b = j < b.size() ? b[j].step : kEnd;
    const int64_t step = std::min(step_a, step_b);
    std::optional<double> value_a, value_b;
    if (step_a == step && i < a.size()) value_a = a[i++].value;
    if (step_b == step && j < b.size()) value_b = b[j++].value;
    use(step, value_a, value_b);
  }
}

std::set<std::string> names_in(const MetricTable& table) {
  std::set<std::string> names;
  for (const MetricCurve& curve : table.curves) {
    if (!curve.points.empty()) names.insert(curve.name);
  }
  return names;
}

std::optional<RunComparison::Metric> compare_curves(const MetricCurve& a, const MetricCurve& b, int64_t& num_values) {
  std::optional<RunComparison::Metric> found;
  for_each_place(a.points, b.points, [&](int64_t step, std::optional<double> value_a, std::optional<double> value_b) {
    ++num_values;
    if (is_same(value_a, value_b)) return;
    const MetricDifference difference{.metric = a.name, .step = step, .first = value_a, .second = value_b};
    if (!found) found = {.earliest = difference};
    ++(difference.is_missing() ? found->num_missing : found->num_different);
    if (difference.is_missing()) return;
    if (!found->largest || difference.amount() > found->largest->amount()) found->largest = difference;
  });
  return found;
}

std::string text_of(const std::optional<double>& value) { return value ? fmt::format("{:.9g}", *value) : "missing"; }

// "0.5 and 0.25, a difference of 0.25".
std::string text_of(const MetricDifference& difference) {
  const std::string values = fmt::format("{} and {}", text_of(difference.first), text_of(difference.second));
  const double amount = difference.amount();
  return std::isfinite(amount) ? fmt::format("{}, a difference of {:.3g}", values, amount) : values;
}

std::string list_of(std::span<const std::string> names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + terminal_text(name);
  return list;
}

std::string headline(const RunComparison& comparison, const std::string& first, const std::string& second) {
  if (comparison.compared.empty()) return fmt::format("{} and {} have no metric in common\n", first, second);
  if (comparison.different.empty()) {
    return fmt::format("{} and {} have the same {} values of {}\n", first, second, comparison.num_values,
                       list_of(comparison.compared));
  }
  const MetricDifference& earliest = comparison.different[0].earliest;
  return fmt::format("{} and {} differ from step {} on: {} is {}\n", first, second, earliest.step,
                     terminal_text(earliest.metric), text_of(earliest));
}

std::string table_of(std::span<const RunComparison::Metric> metrics) {
  size_t width = std::string_view("metric").size();
  for (const auto& metric : metrics) width = std::max(width, columns_of(metric.earliest.metric));
  std::string table = padded("metric", width) + "  first at step  different  missing  largest difference\n";
  for (const auto& [earliest, largest, num_different, num_missing] : metrics) {
    const std::string most = largest ? fmt::format("at step {}: {}", largest->step, text_of(*largest)) : "-";
    table += fmt::format("{}  {:>13}  {:>9}  {:>7}  {}\n", padded(earliest.metric, width), earliest.step, num_different,
                         num_missing, most);
  }
  return table;
}

}  // namespace

double MetricDifference::amount() const {
  const double distance = first && second ? std::abs(*first - *second) : std::numeric_limits<double>::infinity();
  return std::isfinite(distance) ? distance : std::numeric_limits<double>::infinity();
}

RunComparison compare_runs(const MetricTable& first, const MetricTable& second, CompareOptions options) {
  RunComparison comparison;
  const std::set<std::string> in_first = names_in(first), in_second = names_in(second);
  std::set<std::string> all = in_first;
  all.insert(in_second.begin(), in_second.end());
  for (const std::string& name : all) {
    if (measures_machine(name) && !options.compares_machine) {
      comparison.ignored.push_back(name);
    } else if (!in_second.contains(name)) {
      comparison.only_in_first.push_back(name);
    } else if (!in_first.contains(name)) {
      comparison.only_in_second.push_back(name);
    } else {
      comparison.compared.push_back(name);
      const auto metric = compare_curves(*first.find(name), *second.find(name), comparison.num_values);
      if (metric) comparison.different.push_back(*metric);
    }
  }
  std::ranges::stable_sort(comparison.different, {}, [](const auto& metric) { return metric.earliest.step; });
  return comparison;
}

std::string to_text(const RunComparison& comparison, const std::string& first_name, const std::string& second_name) {
  const std::string first = terminal_text(first_name), second = terminal_text(second_name);
  std::string text = headline(comparison, first, second);
  if (!comparison.different.empty()) text += "\n" + table_of(comparison.different);
  const auto add_list = [&](std::string_view what, const std::vector<std::string>& names) {
    if (!names.empty()) text += fmt::format("{}: {}\n", what, list_of(names));
  };
  add_list(fmt::format("only in {}", first), comparison.only_in_first);
  add_list(fmt::format("only in {}", second), comparison.only_in_second);
  add_list("not compared, because they measure time or the machine", comparison.ignored);
  return text;
}

}  // namespace fulgur
