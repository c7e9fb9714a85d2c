#include "tools/scaling/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <memory>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/error.h"
#include "fulgur/strategies/presets.h"
#include "tools/scaling/replay.h"

namespace fulgur::scaling {
namespace {

constexpr int64_t kWidth = 2576, kLayers = 3, kBatch = 32, kSteps = 5;
constexpr int kRounds = 7;
constexpr int64_t kFitted = 2, kMeasured = 4;  // ranks
constexpr int64_t kRecordedWidth = 192;        // so that buckets of 1 to 4 ranks need no padding
constexpr std::array kStrategies{"ddp", "ddp_sharded"};
constexpr int64_t kHosts = 2;                                // each has one rank
constexpr std::array<int64_t, 2> kHostWidths{1152, kWidth};  // the wire is fitted to the first

// Microseconds of a step, which the program prints first in its last line.
double measure(const std::string& program, const std::string& strategy, int64_t ranks) {
  const std::string command =
      fmt::format("OMP_NUM_THREADS=1 '{}' --width={} --depth={} --steps={} --strategy={} --devices={} 2>/dev/null",
                  program, kWidth, kLayers, kSteps, strategy, ranks);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> output(::popen(command.c_str(), "r"), &::pclose);
  std::string text;
  std::array<char, 4096> part{};
  while (output && std::fgets(part.data(), part.size(), output.get()) != nullptr) text += part.data();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const size_t begin = text.rfind('\n');
  double microseconds = 0;
  if (begin == std::string::npos || std::sscanf(text.c_str() + begin + 1, "%lf", &microseconds) != 1) {
    throw UsageError(
        fmt::format("'{}' has not printed the time of a step; build //bench:ddp_step and pass its path", command));
  }
  return microseconds / 1e6;
}

// What else runs on the host only adds to a step.
double shortest(const std::vector<double>& seconds) { return std::ranges::min(seconds); }

ModelShape model(int64_t width = kWidth) { return {.layers = kLayers, .width = width, .is_perceptron = true}; }

Workload workload_of(const std::string& strategy, int64_t width, int64_t ranks) {
  const auto params = static_cast<double>(model(width).num_params());
  return {.num_params = params,
          .param_bytes = 4,
          .forward_flops = 2 * params * kBatch,
          .backward_flops = 4 * params * kBatch,
          .extra_step_bytes = 12,  // parameters are read twice, and gradients are written
          .shards = strategy == "ddp_sharded" ? ranks : 1};
}

// The step on a host where one constant counts, and nothing else takes time.
double computed(const std::string& strategy, const RecordedStep& recorded, int64_t ranks, int64_t cores,
                double flops_per_s, double bytes_per_s) {
  Machine machine;
  machine.device = {.name = "core", .flops_per_s = flops_per_s, .memory_bytes_per_s = bytes_per_s, .source = ""};
  machine.within = {.name = "memory", .bytes_per_s = bytes_per_s, .latency_s = 0, .source = ""};
  machine.between = machine.within;
  machine.ranks_per_host = ranks;
  machine.cores_per_host = cores;
  return replay(recorded, workload_of(strategy, kWidth, ranks), machine, ranks).step_s;
}

RecordedStep record(const std::string& strategy, int64_t ranks, int64_t width = kWidth) {
  const double narrower = std::pow(static_cast<double>(kRecordedWidth) / static_cast<double>(width), 2);
  const RankOptions usual;
  const RankOptions options{.bucket_cap_mib = usual.bucket_cap_mib * narrower,
                            .first_bucket_mib = usual.first_bucket_mib * narrower};
  const StrategyChoice choice =
      strategy == "ddp" ? StrategyChoice(options) : StrategyChoice(DdpSharded{.ranks = options});
  return record_step(choice, {.layers = kLayers, .width = kRecordedWidth, .is_perceptron = true}, "32", ranks);
}

// The step on two hosts of one rank each, which are network namespaces of this host: they share its memory, and neither
// needs a core to wait for the wire.
double computed_on_hosts(const Fitted& fitted, const RecordedStep& recorded, int64_t width, double wire_bytes_per_s) {
  Machine machine;
  const double memory = fitted.bytes_per_s / kHosts;
  machine.device = {.name = "core", .flops_per_s = fitted.flops_per_s, .memory_bytes_per_s = memory, .source = ""};
  machine.between = {.name = "wire", .bytes_per_s = wire_bytes_per_s, .latency_s = 0, .source = ""};
  machine.within = machine.between;
  machine.ranks_per_host = 1;
  machine.cores_per_host = kHosts;
  return replay(recorded, workload_of(fitted.strategy, width, kHosts), machine, kHosts).step_s;
}

// The bytes per second of a wire with which the step takes so long; less than 1 KB/s or more than 1 TB/s is not looked
// for.
double wire_of(const Fitted& fitted, int64_t width, double seconds) {
  const RecordedStep recorded = record(fitted.strategy, kHosts, width);
  double slow = 1e3, fast = 1e12;
  if (seconds <= computed_on_hosts(fitted, recorded, width, fast)) {
    throw UsageError(fmt::format(
        "--two_hosts_ms: {:.1f} ms of {} with the width {} are less than a rank computes by --steps_ms; measure "
        "both again while nothing else runs",
        seconds * 1e3, fitted.strategy, width));
  }
  for (int i = 0; i < 100; ++i) {
    const double middle = std::sqrt(slow * fast);
    (computed_on_hosts(fitted, recorded, width, middle) > seconds ? slow : fast) = middle;
  }
  return fast;
}

}  // namespace

bool Calibration::is_plausible() const {
  return std::ranges::all_of(strategies,
                             [](const Fitted& fitted) { return fitted.flops_per_s > 0 && fitted.bytes_per_s > 0; });
}

double Calibration::largest_error() const {
  double largest = 0;
  for (const Fitted& fitted : strategies) {
    for (const Fitted::Step& step : fitted.steps) largest = std::max(largest, std::abs(step.error()));
  }
  return largest;
}

// A step takes flops / x + bytes / y seconds: two steps give x and y.
Calibration fit(int64_t cores, const std::vector<std::vector<double>>& seconds) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  Calibration calibration{.cores = cores, .num_params = static_cast<double>(model().num_params()), .strategies = {}};
  for (size_t s = 0; s < seconds.size(); ++s) {
    Fitted& fitted = calibration.strategies.emplace_back(Fitted{.strategy = kStrategies[s], .steps = {}});
    std::vector<double> flops, bytes;
    for (int64_t ranks = 1; ranks <= std::ssize(seconds[s]); ++ranks) {
      const RecordedStep recorded = record(fitted.strategy, ranks);
      flops.push_back(computed(fitted.strategy, recorded, ranks, cores, 1, kInfinite));
      bytes.push_back(computed(fitted.strategy, recorded, ranks, cores, kInfinite, 1));
    }
    const double determinant = flops[0] * bytes[1] - flops[1] * bytes[0];
    const double per_flop = (seconds[s][0] * bytes[1] - seconds[s][1] * bytes[0]) / determinant;
    const double per_byte = (flops[0] * seconds[s][1] - flops[1] * seconds[s][0]) / determinant;
    fitted.flops_per_s = 1 / per_flop;
    fitted.bytes_per_s = 1 / per_byte;
    for (int64_t ranks = 1; ranks <= std::ssize(seconds[s]); ++ranks) {
      const auto r = static_cast<size_t>(ranks - 1);
      fitted.steps.push_back({ranks, seconds[s][r], flops[r] * per_flop + bytes[r] * per_byte});
    }
  }
  return calibration;
}

Calibration calibrate(const std::string& program) {
  std::vector<std::vector<std::vector<double>>> rounds(kStrategies.size(), std::vector<std::vector<double>>(kMeasured));
  for (int round = 0; round < kRounds; ++round) {  // strategies take turns, so that each meets the same neighbours
    for (size_t s = 0; s < kStrategies.size(); ++s) {
      for (int64_t ranks = 1; ranks <= kMeasured; ++ranks) {
        rounds[s][static_cast<size_t>(ranks - 1)].push_back(measure(program, kStrategies[s], ranks));
      }
    }
  }
  std::vector<std::vector<double>> seconds(kStrategies.size());
  for (size_t s = 0; s < seconds.size(); ++s)
    std::ranges::transform(rounds[s], std::back_inserter(seconds[s]), shortest);
  return fit(static_cast<int64_t>(cores_of_process().size()), seconds);
}

Calibration check(const std::vector<double>& steps_ms) {
  const size_t num_ranks = steps_ms.size() / kStrategies.size();
  if (num_ranks < static_cast<size_t>(kFitted) || steps_ms.size() % kStrategies.size() != 0) {
    throw UsageError(fmt::format(
        "--steps_ms has {} numbers; write as many for ddp as for ddp_sharded, of 1, 2, ... ranks", steps_ms.size()));
  }
  std::vector<std::vector<double>> seconds(kStrategies.size());
  for (size_t i = 0; i < steps_ms.size(); ++i) seconds[i / num_ranks].push_back(steps_ms[i] / 1e3);
  return fit(static_cast<int64_t>(cores_of_process().size()), seconds);
}

HostsCheck check_hosts(const Calibration& calibration, const std::vector<double>& two_hosts_ms) {
  if (two_hosts_ms.size() != kHostWidths.size() * kStrategies.size()) {
    throw UsageError(fmt::format(
        "--two_hosts_ms has {} numbers; write 4: ddp and ddp_sharded with the width {}, then with the width {}",
        two_hosts_ms.size(), kHostWidths[0], kHostWidths[1]));
  }
  HostsCheck result;
  result.bytes_per_s = wire_of(calibration.strategies[0], kHostWidths[0], two_hosts_ms[0] / 1e3);
  size_t next = 0;
  for (const int64_t width : kHostWidths) {
    for (const Fitted& fitted : calibration.strategies) {
      const RecordedStep recorded = record(fitted.strategy, kHosts, width);
      result.steps.push_back({.strategy = fitted.strategy,
                              .width = width,
                              .measured_s = two_hosts_ms[next++] / 1e3,
                              .computed_s = computed_on_hosts(fitted, recorded, width, result.bytes_per_s)});
    }
  }
  return result;
}

double HostsCheck::largest_error() const {
  double largest = 0;
  for (const Step& step : steps) largest = std::max(largest, std::abs(step.error()));
  return largest;
}

std::string to_text(const HostsCheck& check) {
  std::string text = fmt::format("two hosts of one rank: fitted to the first line: {:.3f} GB/s of the wire\n",
                                 check.bytes_per_s / 1e9);
  for (const HostsCheck::Step& step : check.steps) {
    text += fmt::format("  {:<11} width {}: measured {:7.1f}, computed {:7.1f}, error {:+.1f}%\n", step.strategy,
                        step.width, step.measured_s * 1e3, step.computed_s * 1e3, step.error() * 100);
  }
  return text +
         fmt::format("largest error: {:.1f}%, allowed: {:.0f}%\n", check.largest_error() * 100, kLargestError * 100);
}

std::string to_text(const Calibration& calibration) {
  std::string text = fmt::format("{:.0f} M parameters, {} cores, one thread a rank; a step in ms\n",
                                 calibration.num_params / 1e6, calibration.cores);
  for (const Fitted& fitted : calibration.strategies) {
    text += fmt::format("{}: fitted to 1 and 2 ranks: {:.1f} GFLOPS of a core, {:.1f} GB/s of memory\n",
                        fitted.strategy, fitted.flops_per_s / 1e9, fitted.bytes_per_s / 1e9);
    for (const Fitted::Step& step : fitted.steps) {
      text += fmt::format("  {} ranks: measured {:7.1f}, computed {:7.1f}", step.ranks, step.measured_s * 1e3,
                          step.computed_s * 1e3);
      text += step.ranks <= kFitted ? ", fitted\n" : fmt::format(", error {:+.1f}%\n", step.error() * 100);
    }
  }
  if (!calibration.is_plausible()) {
    text +=
        "a constant is negative, so two ranks were slower than cores and memory explain; measure again while nothing "
        "else runs\n";
  }
  return text + fmt::format("largest error: {:.1f}%, allowed: {:.0f}%\n", calibration.largest_error() * 100,
                            kLargestError * 100);
}

}  // namespace fulgur::scaling
