#include "tools/scaling/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <memory>

#include "fulgur/base/error.h"
#include "fulgur/device/stream_worker.h"
#include "fulgur/strategies/presets.h"
#include "tools/scaling/replay.h"

namespace fulgur::scaling {
namespace {

constexpr int64_t kWidth = 2576, kLayers = 3, kBatch = 32, kSteps = 10;
constexpr int kRounds = 3;
constexpr int64_t kFitted = 2, kMeasured = 4;  // ranks
constexpr int64_t kRecordedWidth = 192;        // so that buckets of 1 to 4 ranks need no padding
constexpr std::array kStrategies{"ddp", "ddp_sharded"};

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

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

ModelShape model() { return {.layers = kLayers, .width = kWidth, .is_perceptron = true}; }

// The step on a host where one constant counts, and nothing else takes time.
double computed(const std::string& strategy, const RecordedStep& recorded, int64_t ranks, int64_t cores,
                double flops_per_s, double bytes_per_s) {
  const auto params = static_cast<double>(model().num_params());
  const Workload workload{.num_params = params,
                          .param_bytes = 4,
                          .forward_flops = 2 * params * kBatch,
                          .backward_flops = 4 * params * kBatch,
                          .extra_step_bytes = 12,  // parameters are read twice, and gradients are written
                          .shards = strategy == "ddp_sharded" ? ranks : 1};
  Machine machine;
  machine.device = {.name = "core", .flops_per_s = flops_per_s, .memory_bytes_per_s = bytes_per_s, .source = ""};
  machine.within = {.name = "memory", .bytes_per_s = bytes_per_s, .latency_s = 0, .source = ""};
  machine.between = machine.within;
  machine.ranks_per_host = ranks;
  machine.cores_per_host = cores;
  return replay(recorded, workload, machine, ranks).step_s;
}

RecordedStep record(const std::string& strategy, int64_t ranks) {
  const double narrower = std::pow(static_cast<double>(kRecordedWidth) / kWidth, 2);
  const RankOptions usual;
  const RankOptions options{.bucket_cap_mib = usual.bucket_cap_mib * narrower,
                            .first_bucket_mib = usual.first_bucket_mib * narrower};
  const StrategyChoice choice =
      strategy == "ddp" ? StrategyChoice(options) : StrategyChoice(DdpSharded{.ranks = options});
  return record_step(choice, {.layers = kLayers, .width = kRecordedWidth, .is_perceptron = true}, "32", ranks);
}

}  // namespace

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
  for (size_t s = 0; s < seconds.size(); ++s) std::ranges::transform(rounds[s], std::back_inserter(seconds[s]), median);
  return fit(static_cast<int64_t>(cores_of_process().size()), seconds);
}

std::string to_text(const Calibration& calibration) {
  std::string text = fmt::format("{:.0f} M parameters, {} cores, one thread a rank; a step in ms, median of {} runs\n",
                                 calibration.num_params / 1e6, calibration.cores, kRounds);
  for (const Fitted& fitted : calibration.strategies) {
    text += fmt::format("{}: fitted to 1 and 2 ranks: {:.1f} GFLOPS of a core, {:.1f} GB/s of memory\n",
                        fitted.strategy, fitted.flops_per_s / 1e9, fitted.bytes_per_s / 1e9);
    for (const Fitted::Step& step : fitted.steps) {
      text += fmt::format("  {} ranks: measured {:7.1f}, computed {:7.1f}", step.ranks, step.measured_s * 1e3,
                          step.computed_s * 1e3);
      text += step.ranks <= kFitted ? ", fitted\n" : fmt::format(", error {:+.1f}%\n", step.error() * 100);
    }
  }
  return text + fmt::format("largest error: {:.1f}%, allowed: {:.0f}%\n", calibration.largest_error() * 100,
                            kLargestError * 100);
}

}  // namespace fulgur::scaling
