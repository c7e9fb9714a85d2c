// Computes what a step of a large model would take on many ranks, from the schedule that the engine runs:
//   bazel run //tools:scale -- --params=10e9 --hosts=16 --gpus=8 --device=h100 --between=400g
//   bazel run //tools:scale -- --calibrate=bazel-bin/bench/ddp_step   (checks the model by this machine)
// docs/scale.md says what is measured and what is computed.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/reports/command.h"
#include "tools/scaling/calibration.h"
#include "tools/scaling/scenario.h"
#include "tools/scaling/tables.h"

namespace {

using namespace fulgur;
using namespace fulgur::scaling;

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  if (!file.flush()) throw UsageError(fmt::format("cannot write '{}'; choose a file in a folder that exists", path));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Computes the step time, bytes and memory of a large model on many ranks, from the engine's own schedule.");
  ScenarioOptions options;
  std::string svg, program;
  std::vector<double> steps_ms, two_hosts_ms;
  const auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, fmt::format("{}; default: {}", help, value));
  };
  const auto add_measured = [&](const char* name, double& value, const char* help) {
    app.add_option(name, value, fmt::format("measured {}; default: as listed for the device or link", help));
  };
  const std::string links = fmt::format("{}", fmt::join(link_names(), ", "));
  add("--params", options.num_params, "number of parameters of a transformer, such as 10e9");
  add("--width", options.width, "width of the transformer's layers");
  add("--tokens", options.tokens, "tokens of a sample");
  add("--batch", options.batch, "samples of a rank and step, as far as memory allows");
  add("--global_batch", options.global_batch, "samples of a step of all ranks, for strong scaling");
  add("--hosts", options.hosts, "number of hosts that are looked at closely");
  add("--gpus", options.ranks_per_host, "number of ranks on each host");
  add("--max_ranks", options.max_ranks, "number of ranks at which the tables end");
  app.add_option(
      "--device", options.device,
      fmt::format("what a rank computes on: {}; default: {}", fmt::join(device_names(), ", "), options.device));
  app.add_option("--within", options.within,
                 fmt::format("link between the ranks of a host: {}; default: the usual one of the device", links));
  app.add_option("--between", options.between,
                 "link between hosts, of the same names; default: the usual one of the device");
  add("--precision", options.precision, "bf16-true or bf16-mixed");
  add_measured("--tflops", options.tflops, "TFLOPS that forward and backward reach");
  add_measured("--within_gb_s", options.within_gb_s, "GB/s that a rank sends within its host");
  add_measured("--between_gb_s", options.between_gb_s, "GB/s that a host sends");
  add_measured("--to_host_gb_s", options.to_host_gb_s, "GB/s that a rank copies to its host, or back");
  add_measured("--host_memory_gb_s", options.host_memory_gb_s, "GB/s of a rank's update on its host");
  app.add_option("--svg", svg, "file for a picture of the weak scaling");
  app.add_option("--calibrate", program, "bench/ddp_step, to measure this machine by and check the model");
  app.add_option(
      "--steps_ms", steps_ms,
      "check the model by steps that were measured so before: milliseconds of ddp on 1, 2, ... ranks, then as "
      "many of ddp_sharded");
  app.add_option("--two_hosts_ms", two_hosts_ms,
                 "check the model by steps on two hosts, too, which tools/scaling/check_two_hosts.py measures and "
                 "passes: milliseconds "
                 "of ddp and ddp_sharded on a small model, then on that of --steps_ms or --calibrate, which is needed");
  return run_command(app, argc, argv, [&] {
    set_log_level(LogLevel::warning);  // strategies say what is meant for a run
    if (!program.empty() || !steps_ms.empty()) {
      const Calibration calibration = program.empty() ? check(steps_ms) : calibrate(program);
      std::cout << to_text(calibration);
      double largest_error = calibration.largest_error();
      if (!two_hosts_ms.empty()) {
        const HostsCheck hosts = check_hosts(calibration, two_hosts_ms);
        std::cout << to_text(hosts);
        largest_error = std::max(largest_error, hosts.largest_error());
      }
      return calibration.is_plausible() && largest_error <= kLargestError ? 0 : 1;
    }
    if (!two_hosts_ms.empty()) {
      throw UsageError("--two_hosts_ms needs the steps of one host; add --steps_ms=... or --calibrate=PROGRAM");
    }
    Scenario scenario(options);
    std::cout << assumptions(scenario) << '\n' << closely(scenario) << '\n';
    const std::vector<TableRow> weak = weak_scaling(scenario);
    std::cout << to_text("Weak scaling", scenario, weak) << crossings(weak) << '\n';
    std::cout << to_text("Strong scaling", scenario, strong_scaling(scenario));
    if (!svg.empty()) write(svg, picture(scenario, weak));
    return 0;
  });
}
