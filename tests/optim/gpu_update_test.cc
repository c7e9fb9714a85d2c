#include "fulgur/optim/gpu_update.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

#include "fulgur/optim/adagrad.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/rmsprop.h"
#include "fulgur/optim/sgd.h"

namespace fulgur::optim {
namespace {

struct Kind {
  const char* name;
  std::function<Optimizers(std::vector<at::Tensor>)> make;
};

const Kind kKinds[] = {
    {"Adam", [](auto params) { return Adam(params, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"AdamW", [](auto params) { return AdamW(params, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"SGD", [](auto params) { return SGD(params, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"Nesterov", [](auto params) { return SGD(params, {.lr = 0.1, .momentum = 0.9, .nesterov = true}); }},
    {"Adagrad", [](auto params) { return Adagrad(params, {.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1}); }},
    {"RMSprop",
     [](auto params) { return RMSprop(params, {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9, .centered = true}); }},
    {"Lion", [](auto params) { return Lion(params, {.lr = 0.01, .weight_decay = 0.1}); }},
};

// Parameters of all types, with a layout that is not contiguous and sizes that do not divide.
std::vector<at::Tensor> parameters(c10::Device device) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  std::vector<at::Tensor> params;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t size : {1, 1001, 70'000}) params.push_back(torch::randn({size}, generator).to(device, dtype));
    params.push_back(torch::randn({33, 65}, generator).to(device, dtype).t());
    params.push_back(torch::randn({40, 12}, generator).to(device, dtype).slice(1, 0, 7));
  }
  return params;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& params, int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& param : params) {
    gradients.push_back(torch::randn(param.sizes(), generator).to(param.device(), param.scalar_type()));
  }
  return gradients;
}

std::vector<at::Tensor> trained(const Kind& kind, c10::Device device) {
  const std::vector<at::Tensor> params = parameters(device);
  const Optimizers optimizers = kind.make(params);
  for (int step = 0; step < 10; ++step) {
    const std::vector<at::Tensor> gradients = gradients_of(params, step);
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = step == 3 && i % 2 ? at::Tensor() : gradients[i];  // counts of updates differ
    }
    GradientTransform transform{.factor = torch::tensor(0.3, at::device(device).dtype(at::kDouble))};
    if (step % 2) transform.clip_value = 0.2;
    optimizers[0].step(transform);
    const std::vector<at::Tensor> as_they_were = gradients_of(params, step);
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(!params[i].grad().defined() || params[i].grad().equal(as_they_were[i])) << "gradient " << i;
    }
  }
  return params;
}

class GpuUpdate : public ::testing::TestWithParam<Kind> {};

TEST_P(GpuUpdate, HasTheBitsOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const c10::Device gpu(c10::kCUDA, 0);
  if (!has_update_kernels(gpu)) GTEST_SKIP() << "kernels are not for this GPU";
  const std::vector<at::Tensor> on_cpu = trained(GetParam(), c10::kCPU), on_gpu = trained(GetParam(), gpu);
  for (size_t i = 0; i < on_cpu.size(); ++i) EXPECT_TRUE(on_gpu[i].cpu().equal(on_cpu[i])) << "parameter " << i;
}

INSTANTIATE_TEST_SUITE_P(, GpuUpdate, ::testing::ValuesIn(kKinds),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(GpuUpdateKernels, AreNotForACpu) {
  EXPECT_FALSE(has_update_kernels(c10::kCPU));
  EXPECT_FALSE(has_update_kernels(c10::kMeta));
}

}  // namespace
}  // namespace fulgur::optim
