// A run of several ranks that behaves as MODE says: rank_program MODE [name=value ...]; see launcher_test.py.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>

#include "fulgur/cli/command_line.h"
#include "fulgur/launch/run_distributed.h"

namespace {

using namespace fulgur;

struct Settings {
  std::string mode;
  std::map<std::string, std::string> values{
      {"devices", "2"}, {"nodes", "1"}, {"victim", "1"}, {"folder", ""}, {"connect", "20"}};

  Settings(int argc, char** argv) : mode(argc > 1 ? argv[1] : "") {
    for (int i = 2; i < argc; ++i) {
      const std::string text = argv[i];
      values.at(text.substr(0, text.find('='))) = text.substr(text.find('=') + 1);
    }
  }
  int64_t number(const std::string& name) const { return std::stoll(values.at(name)); }
};

// Tells the test which process this rank is.
void leave_pid(const Settings& settings, int64_t rank) {
  if (settings.values.at("folder").empty()) return;
  const std::filesystem::path file = settings.values.at("folder") + "/" + std::to_string(rank);
  std::ofstream(file.string() + ".part") << ::getpid();
  std::filesystem::rename(file.string() + ".part", file);
}

int64_t sum_over_ranks(World& world) {
  const at::Tensor flat = at::full({1000}, world.rank() + 1, at::kLong);
  world.data().reduce_scatter(flat).wait();
  world.data().all_gather(flat).wait();
  return flat[999].item<int64_t>();
}

[[noreturn]] void compute_for_ever() {
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

void misbehave(const Settings& settings) {
  if (settings.mode == "throw") throw std::runtime_error("boom");
  if (settings.mode == "throw-number") throw 7;
  if (settings.mode.starts_with("exit")) std::_Exit(settings.mode == "exit-200" ? 200 : 7);
}

void run(const Settings& settings, World& world) {
  const bool is_victim = world.rank() == settings.number("victim");
  if (settings.mode == "ok-without-sigchld") std::signal(SIGCHLD, SIG_IGN);
  for (int64_t step = 0; !settings.mode.starts_with("ok"); ++step) {
    world.set_step(step);
    sum_over_ranks(world);
    if (step == 3) leave_pid(settings, world.rank());
    if (step == 3 && is_victim) {
      fmt::print("about to misbehave\nat step {}\n", step);
      std::cout.flush();
      misbehave(settings);
    }
    if (step == 3 && settings.mode == "exit-beside-a-busy-rank" && world.rank() == 0) compute_for_ever();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // a step's work
  }
  std::cout << fmt::format("rank {} of {}, sum {}, {} threads", world.rank(), world.world_size(), sum_over_ranks(world),
                           at::get_num_threads())
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  return fulgur::exit_code_of([&] {
    const Settings settings(argc, argv);
    const SessionOptions options{
        .devices = std::vector<c10::Device>(static_cast<size_t>(settings.number("devices")), c10::kCPU),
        .num_nodes = settings.number("nodes"),
        .world = {.timeout_s = 20,
                  .connect_timeout_s = static_cast<double>(settings.number("connect")),
                  .heartbeat_interval_s = 0.2}};
    run_distributed(options, [&](World& world) { run(settings, world); });
  });
}
