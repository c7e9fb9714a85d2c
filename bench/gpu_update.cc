// What an update by AdamW costs on a GPU, or on a CPU where there is none: by our kernel, by torch's, and a copy in the
// device's memory that reads and writes as many bytes.
//   gpu_update --dtype=bf16 --num_elements=124000000
// Also the norm of the gradients, which reads them once: by our kernel and by torch's. Prints one line with the medians
// of rounds in which all take turns:
//   124000000 bf16: ours 1.200 ms, torch 2.010 ms, copy 1.110 ms; norm: ours 0.090 ms, torch 0.120 ms
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "fulgur/cli/command_line.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/adam.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string dtype = "fp32";
  int64_t num_elements = 124'000'000, num_tensors = 148;
  int64_t steps = 5, rounds = 7;

  void describe(FieldVisitor& visit) {
    visit({.name = "dtype", .help = "type of parameters and gradients", .choices = {"fp32", "bf16", "fp16"}}, &dtype);
    visit({.name = "num_elements", .help = "parameters in all", .min = 1}, &num_elements);
    visit({.name = "num_tensors", .help = "tensors of equal size that they are in", .min = 1}, &num_tensors);
    visit({.name = "steps", .help = "updates that are timed together", .min = 1}, &steps);
    visit({.name = "rounds", .help = "times that they are timed", .min = 1}, &rounds);
  }
};

void wait_for_device() {
  if (torch::cuda::is_available()) torch::cuda::synchronize();
}

double milliseconds(int64_t steps, const std::function<void()>& step) {
  wait_for_device();
  const auto start = Clock::now();
  for (int64_t i = 0; i < steps; ++i) step();
  wait_for_device();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / static_cast<double>(steps);
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void run(Options options) {
  const c10::Device device = torch::cuda::is_available() ? c10::Device(c10::kCUDA, 0) : c10::Device(c10::kCPU);
  const at::ScalarType dtype = options.dtype == "fp32"   ? at::kFloat
                               : options.dtype == "bf16" ? at::kBFloat16
                                                         : at::kHalf;
  std::vector<at::Tensor> params, gradients;
  for (int64_t i = 0; i < options.num_tensors; ++i) {
    params.push_back(torch::randn({options.num_elements / options.num_tensors}, at::device(device)).to(dtype));
    gradients.push_back(torch::randn(params.back().sizes(), at::device(device)).to(dtype));
  }
  optim::AdamW adamw(params);
  const GradientTransform transform{.factor = torch::tensor(0.5, at::device(device).dtype(at::kDouble))};
  const auto set_gradients = [&] {
    for (size_t i = 0; i < params.size(); ++i) params[i].mutable_grad() = gradients[i];
  };
  // The parameter in fp32 and both moments are read and written, the gradient is read, and a 16-bit parameter is
  // written: 28 bytes for every type.
  const at::Tensor from = torch::zeros({options.num_elements * 14}, at::device(device).dtype(at::kByte));
  const at::Tensor to = torch::empty_like(from);
  at::Tensor norm;
  const std::vector<std::function<void()>> arms{
      [&] { adamw.step(transform); },
      [&] { adamw.step_with_torch(transform); },
      [&] { at::Tensor(to).copy_(from); },
      [&] { norm = joint_norm(gradients); },
      [&] { norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, 2, at::kDouble)), 2); },
  };
  std::vector<std::vector<double>> times(arms.size());
  for (int64_t round = -1; round < options.rounds; ++round) {
    for (size_t arm = 0; arm < arms.size(); ++arm) {
      set_gradients();
      const double time = milliseconds(options.steps, arms[arm]);
      if (round >= 0) times[arm].push_back(time);  // the first one warms up
    }
  }
  fmt::print("{} {}{}: ours {:.3f} ms, torch {:.3f} ms, copy {:.3f} ms; norm: ours {:.3f} ms, torch {:.3f} ms\n",
             options.num_elements, options.dtype, device.is_cpu() ? " on the CPU, for want of a GPU" : "",
             median(times[0]), median(times[1]), median(times[2]), median(times[3]), median(times[4]));
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
