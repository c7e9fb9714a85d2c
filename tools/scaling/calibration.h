#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fulgur::scaling {

inline constexpr double kLargestError = 0.15;  // a prediction may be wrong by this fraction

// Steps of one strategy on this host, whose ranks share cores and memory.
struct Fitted {
  std::string strategy;
  double flops_per_s = 0;  // what one core reaches
  double bytes_per_s = 0;  // what memory gives to all ranks together
  struct Step {
    int64_t ranks = 0;
    double measured_s = 0;
    double computed_s = 0;
    double error() const { return computed_s / measured_s - 1; }
  };
  std::vector<Step> steps;
};

struct Calibration {
  int64_t cores = 0;
  double num_params = 0;
  std::vector<Fitted> strategies;
  bool is_plausible() const;  // all constants are positive: otherwise steps of one rank and of two contradict the model
  double largest_error() const;  // over all predictions
};

// Measures a perceptron of 20 million parameters by the program bench/ddp_step on 1 to 4 ranks of this host, fits the
// two constants of each strategy to the steps of one rank and of two, and computes those of three and four. Throws
// UsageError if the program cannot be run.
Calibration calibrate(const std::string& program);

// The same for steps that were measured on this host before, in milliseconds: those of ddp on 1, 2, ... ranks, then as
// many of ddp_sharded. Throws UsageError for fewer than two ranks.
Calibration check(const std::vector<double>& steps_ms);

// The same for seconds[strategy][ranks - 1].
Calibration fit(int64_t cores, const std::vector<std::vector<double>>& seconds);

std::string to_text(const Calibration& calibration);

// Steps on two hosts of one rank each, with a wire between them.
struct HostsCheck {
  double bytes_per_s = 0;  // what a host sends
  struct Step {
    std::string strategy;
    int64_t width = 0;
    double measured_s = 0;
    double computed_s = 0;
    double error() const { return computed_s / measured_s - 1; }
  };
  std::vector<Step> steps;
  double largest_error() const;
};

// Takes cores and memory from `calibration`, fits the wire to the first of four steps that
// tools/scaling/check_two_hosts.py has measured, and computes all: ddp and ddp_sharded on a small model, then on the
// model of `calibration`. Throws UsageError for another number of steps, or if the first one is shorter than its
// computing.
HostsCheck check_hosts(const Calibration& calibration, const std::vector<double>& two_hosts_ms);

std::string to_text(const HostsCheck& check);

}  // namespace fulgur::scaling
