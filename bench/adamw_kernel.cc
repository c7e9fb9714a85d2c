// What the fused AdamW kernel costs: against a pass over the same memory without arithmetic, against torch's kernels,
// with 16-bit gradients and copies against three passes, and with two threads against one.
//   ./bazelw run //bench:adamw_kernel
// For bench/python_adamw.py: "adamw_kernel serve <parameters> <threads>" reads lines "fp32 <steps>" or "bf16 <steps>",
// takes that number of steps of optim::AdamW on so many threads and prints a line with the seconds that they took.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/fused_update.h"

#if defined(__x86_64__)
#define FULGUR_BENCH_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FULGUR_BENCH_CLONES
#endif

namespace {

using namespace fulgur;

constexpr double kFp32Bytes = 7 * 4;          // per parameter: param, m, v in and out, gradient in
constexpr double kBf16Bytes = 6 * 4 + 2 * 2;  // gradient in and copy out have 2 bytes
constexpr double kLr = 1e-3, kWeightDecay = 0.01;

struct Buffers {
  int64_t size;
  at::Tensor param, grad, exp_avg, exp_avg_sq, num_updates, grad16, copy16, widened;
  explicit Buffers(int64_t num_elements)
      : size(num_elements),
        param(torch::randn(size)),
        grad(torch::randn(size)),
        exp_avg(torch::randn(size).mul_(0.1)),
        exp_avg_sq(torch::rand(size).add_(0.1)),
        num_updates(torch::tensor(10.0f)),
        grad16(grad.to(at::kBFloat16)),
        copy16(param.to(at::kBFloat16)),
        widened(torch::empty(size)) {}

  optim::Slice<float> slice(const at::Tensor& gradient) {
    return {.param = param.data_ptr<float>(),
            .grad = gradient.data_ptr(),
            .grad_type = gradient.scalar_type(),
            .states = {exp_avg.data_ptr<float>(), exp_avg_sq.data_ptr<float>()},
            .num_elements = size};
  }
};

const optim::AdamRule kRule{.step_size = kLr / 0.65, .inv_root_bias_correction2 = 10.0, .decay = kLr * kWeightDecay};

typedef uint32_t Line __attribute__((vector_size(64), aligned(4)));

// Reads and writes the same memory as the kernel; `zero` is 0, but the compiler cannot know.
FULGUR_BENCH_CLONES void pass(Line* param, const Line* grad, Line* m, Line* v, int64_t num_lines, uint32_t zero) {
  for (int64_t i = 0; i < num_lines; ++i) {
    param[i] ^= grad[i] & zero;
    m[i] ^= zero;
    v[i] ^= zero;
  }
}

void run_pass(Buffers& buffers) {
  static volatile uint32_t zero = 0;
  const auto bits = [](const at::Tensor& tensor) { return reinterpret_cast<Line*>(tensor.data_ptr<float>()); };
  pass(bits(buffers.param), bits(buffers.grad), bits(buffers.exp_avg), bits(buffers.exp_avg_sq), buffers.size / 16,
       zero);
}

void compare_at(int64_t size) {
  const int64_t repeats = std::max<int64_t>(1, (1 << 23) / size);
  const auto repeated = [=](auto body) {
    return [=] {
      for (int64_t i = 0; i < repeats; ++i) body();
    };
  };
  const c10::NoGradGuard no_grad;
  auto shared = std::make_shared<Buffers>(size);
  Buffers& buffers = *shared;
  const double units = static_cast<double>(size * repeats) * 1e-6;
  const auto measure = [&](std::vector<bench::Contender> contenders, double bytes) {
    for (bench::Contender& contender : contenders) {
      contender.run = repeated(contender.run);
      contender.bytes_per_unit = bytes * 1e6;
    }
    bench::side_by_side("M", units, contenders, size > (8 << 20) ? 15 : 31);
  };

  fmt::print("\n{} parameters, fp32, one thread\n", size);
  at::set_num_threads(1);
  const auto kernel = [&] { optim::fused_update(kRule, buffers.slice(buffers.grad)); };
  measure({{"pass without arithmetic", [&] { run_pass(buffers); }}, {"fused_update", kernel}}, kFp32Bytes);
  at::Tensor own = torch::randn(size).set_requires_grad(true);
  own.mutable_grad() = buffers.grad;
  torch::optim::AdamW unfused({own}, torch::optim::AdamWOptions(kLr).weight_decay(kWeightDecay));
  measure({{"fused_update", kernel},
           {"at::_fused_adamw_",
            [&] {
              at::_fused_adamw_({buffers.param}, {buffers.grad}, {buffers.exp_avg}, {buffers.exp_avg_sq}, {},
                                {buffers.num_updates}, kLr, 0.9, 0.999, kWeightDecay, 1e-8, false, false);
            }}},
          kFp32Bytes);
  measure({{"fused_update", kernel}, {"torch::optim::AdamW", [&] { unfused.step(); }}}, kFp32Bytes);

  fmt::print("{} parameters, bf16 gradient in and copy out, one thread\n", size);
  measure({{"fused_update, one pass",
            [&] {
              auto slice = buffers.slice(buffers.grad16);
              slice.copy_out = buffers.copy16.data_ptr();
              slice.copy_type = at::kBFloat16;
              optim::fused_update(kRule, slice);
            }},
           {"cast, fused_update, cast",
            [&] {
              buffers.widened.copy_(buffers.grad16);
              optim::fused_update(kRule, buffers.slice(buffers.widened));
              buffers.copy16.copy_(buffers.param);
            }}},
          kBf16Bytes);

  const auto with_copy = [&](const at::Tensor& gradient, const at::Tensor& copy, const optim::Prediction& prediction) {
    return [&, prediction] {
      auto slice = buffers.slice(gradient);
      slice.copy_out = copy.data_ptr();
      slice.copy_type = copy.scalar_type();
      optim::fused_update(kRule, slice, {}, prediction);
    };
  };
  fmt::print("{} parameters, bf16 gradient in and copy out, one thread, prediction\n", size);
  measure({{"copy ahead by the next update", with_copy(buffers.grad16, buffers.copy16, {.next = kRule})},
           {"copy of the parameters", with_copy(buffers.grad16, buffers.copy16, {})}},
          kBf16Bytes);
  fmt::print("{} parameters, fp32, copy in the gradient's memory, one thread, prediction\n", size);
  measure({{"copy ahead by the next update", with_copy(buffers.grad, buffers.grad, {.next = kRule})},
           {"copy of the parameters", with_copy(buffers.grad, buffers.grad, {})}},
          kFp32Bytes + 4);

  fmt::print("{} parameters, fp32, threads\n", size);
  const auto with_threads = [&](int num_threads) {
    return [&, num_threads] {
      at::set_num_threads(num_threads);
      kernel();
    };
  };
  measure({{"fused_update, two threads", with_threads(2)}, {"fused_update, one thread", with_threads(1)}}, kFp32Bytes);
}

optim::AdamW optimizer_of_one(int64_t size, c10::ScalarType type) {
  const at::Tensor param = torch::randn(size).to(type).set_requires_grad(true);
  param.mutable_grad() = torch::randn(size).to(type);
  return optim::AdamW({param}, {.lr = kLr, .weight_decay = kWeightDecay});
}

void serve(int64_t size, int num_threads) {
  at::set_num_threads(num_threads);
  std::map<std::string, optim::AdamW> optimizers;
  optimizers.emplace("fp32", optimizer_of_one(size, at::kFloat));
  optimizers.emplace("bf16", optimizer_of_one(size, at::kBFloat16));  // with an fp32 master
  std::string type;
  for (int64_t steps; std::cin >> type >> steps;) {
    optim::AdamW& optimizer = optimizers.at(type);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < steps; ++i) optimizer.step();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::cout << time.count() << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "serve") {
    serve(std::stoll(argv[2]), std::stoi(argv[3]));
    return 0;
  }
  for (const int64_t size : {1 << 16, 1 << 20, 1 << 25}) compare_at(size);
}
