#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/reports/metric_table.h"

namespace fulgur {

// A place at which two runs differ.
struct MetricDifference {
  std::string metric;
  int64_t step = 0;
  std::optional<double> first{}, second{};  // the values; nullopt: the run has none at this step

  bool is_missing() const { return !first || !second; }
  double amount() const;  // the absolute difference; infinite if a value is missing or not finite
};

// The result of comparing two runs: the differences of the metrics that both runs have.
struct RunComparison {
  std::vector<std::string> compared{};  // names of metrics, sorted
  std::vector<std::string> only_in_first{}, only_in_second{};
  std::vector<std::string> ignored{};  // metrics that measure time or the machine
  int64_t num_values = 0;              // places at which at least one of the runs has a value
  struct Metric {
    MetricDifference earliest{};
    std::optional<MetricDifference> largest{};  // the largest difference of two values; nullopt: there is none
    int64_t num_different = 0;                  // places at which both have a value
    int64_t num_missing = 0;                    // places at which one run has none
  };
  std::vector<Metric> different{};  // the metrics that differ, in the order of their earliest differences

  // False also if there was nothing to compare.
  bool are_equal() const {
    return !compared.empty() && different.empty() && only_in_first.empty() && only_in_second.empty();
  }
};

struct CompareOptions {
  bool compares_machine = false;  // also compares metrics of time and the machine, which differ in every run
};

// Compares the values that two runs have logged, step by step, as metrics.csv has them: to nine digits. Two NaN are
// equal.
RunComparison compare_runs(const MetricTable& first, const MetricTable& second, CompareOptions options = {});

// Writes the comparison for a terminal, with the names of the runs. Control characters in names become '?'.
std::string to_text(const RunComparison& comparison, const std::string& first_name, const std::string& second_name);

}  // namespace fulgur
