// Forward and backward of a program by its operators, and by the step that //tools:compile_step has compiled. Started
// by bench/compiled_step.py, which makes the files:
//   OMP_NUM_THREADS=1 bazel-bin/bench/compiled_step <program.pt2> <batch.safetensors> [steps] [rounds]
//   OMP_NUM_THREADS=2 bazel-bin/bench/compiled_step time <program.pt2> <batch.safetensors> <steps>
// Prints the time to load the program with its code, too, and by how much a step lifts the process's peak memory.
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;

Batch read_batch(const std::string& file) {
  const SafetensorsFile tensors(file);
  std::vector<Batch::Entry> entries;
  for (const SafetensorsEntry& entry : tensors.entries()) {
    entries.emplace_back(entry.name, tensors.tensor(entry.name).clone());
  }
  return Batch(std::move(entries));
}

void take_step(nn::ProgramImpl& program, const Batch& batch) {
  program.zero_grad();
  run_backward(program.forward(batch)["loss"]);
}

std::function<void()> steps_of(const std::string& file, bool compiled, const Batch& batch, int num_steps) {
  const auto program = nn::Program(file, {.compiled = compiled}).ptr();
  return [=] {
    for (int i = 0; i < num_steps; ++i) take_step(*program, batch);
  };
}

// A line of /proc/self/status in KB: "VmRSS:", what is resident, or "VmHWM:", the most that was.
int64_t resident_kb(const std::string& line) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != line) {
  }
  int64_t kb = 0;
  status >> kb;
  return kb;
}

// For a process of its own: "memory <how> <program> <batch> [checkpoint]" prints the rise of the peak by two steps;
// `how` is "compiled" or "operators", whose activations are computed again in the modules that match `checkpoint`.
void print_memory(const nn::ProgramOptions& options, const std::string& file, const Batch& batch) {
  const auto program = nn::Program(file, options).ptr();
  for (const at::Tensor& parameter : program->parameters()) parameter.sum();  // reads the file
  const int64_t before = resident_kb("VmRSS:");
  std::ofstream("/proc/self/clear_refs") << 5;  // sets the peak back
  for (int i = 0; i < 2; ++i) take_step(*program, batch);
  fmt::print("{} KB\n", resident_kb("VmHWM:") - before);
}

// The code alone, by torch's own loader: what a step could cost at least.
std::function<void()> code_alone(const std::string& file, const Batch& batch, int num_steps) {
  const auto program = nn::Program(file, {.compiled = false}).ptr();
  std::vector<at::Tensor> inputs = program->parameters();
  for (const at::Tensor& buffer : program->buffers()) inputs.push_back(buffer);
  for (const std::string& name : program->input_names()) inputs.push_back(batch[name]);
  const auto code = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file, "step", true);
  return [=] {
    const c10::NoGradGuard no_gradient;
    for (int i = 0; i < num_steps; ++i) code->boxed_run(std::vector<at::Tensor>(inputs));
  };
}

// For comparison with another process: milliseconds per compiled step.
void print_time(const std::string& file, const Batch& batch, int num_steps) {
  const std::function<void()> steps = steps_of(file, /*compiled=*/true, batch, num_steps);
  steps();
  const auto start = std::chrono::steady_clock::now();
  steps();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  fmt::print("{}\n", taken.count() / num_steps);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "memory" && (argc == 5 || argc == 6)) {
    at::set_num_threads(1);
    const nn::ProgramOptions options{.checkpoint = argc == 6 ? argv[5] : "",
                                     .compiled = std::string(argv[2]) == "compiled"};
    print_memory(options, argv[3], read_batch(argv[4]));
    return EXIT_SUCCESS;
  }
  if (first == "time" && argc == 5) {
    print_time(argv[2], read_batch(argv[3]), std::atoi(argv[4]));
    return EXIT_SUCCESS;
  }
  if (argc < 3 || argc > 5) return 2;
  const Batch batch = read_batch(argv[2]);
  const int num_steps = argc > 3 ? std::atoi(argv[3]) : 100, rounds = argc > 4 ? std::atoi(argv[4]) : 7;
  const auto start = std::chrono::steady_clock::now();
  {
    const auto program = nn::Program(first).ptr();
    take_step(*program, batch);
  }
  const std::chrono::duration<double> loading = std::chrono::steady_clock::now() - start;
  fmt::print("program and code loaded, and the first step: {:.3f} s\n", loading.count());
  bench::side_by_side("step", num_steps,
                      {{"operators", steps_of(first, false, batch, num_steps)},
                       {"compiled step", steps_of(first, true, batch, num_steps)},
                       {"its code alone", code_alone(first, batch, num_steps)}},
                      rounds);
}
