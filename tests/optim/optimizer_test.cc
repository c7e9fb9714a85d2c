#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

#include "fulgur/base/error.h"
#include "fulgur/optim/adagrad.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/lars.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/rmsprop.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

std::vector<at::Tensor> parameters() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  std::vector<at::Tensor> params;
  for (const int64_t size : {1, 7, 100}) params.push_back(torch::randn({size}, generator).requires_grad_());
  return params;
}

void set_gradients(const std::vector<at::Tensor>& params, int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  for (const at::Tensor& param : params) param.mutable_grad() = torch::randn(param.sizes(), generator);
}

// Fewer elements than torch's kernels split over threads.
std::vector<at::Tensor> many_parameters() {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(12);
  return {torch::randn({32'000}, generator).requires_grad_()};
}

// ---- Our optimizers with a counterpart in torch, which is the oracle.

using Oracle = std::unique_ptr<torch::optim::Optimizer>;

struct Pair {
  const char* name;
  std::function<Optimizers(std::vector<at::Tensor>)> make_ours;
  std::function<Oracle(std::vector<at::Tensor>)> make_theirs;
};

class OptimizerOfTorch : public ::testing::TestWithParam<Pair> {};

template <class Make>
std::vector<at::Tensor> trained(const std::vector<at::Tensor>& params, int steps, const Make& make) {
  const auto optimizer = make(params);
  for (int step = 0; step < steps; ++step) {
    set_gradients(params, step);
    for (const at::Tensor& param : params) param.mutable_grad() = param.grad().to(param.dtype());
    if constexpr (std::is_same_v<decltype(optimizer), const Oracle>) {
      optimizer->step();
    } else {
      optimizer[0].step();
    }
  }
  return params;
}

std::vector<at::Tensor> doubles(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& param : params) result.push_back(param.detach().to(at::kDouble).requires_grad_());
  return result;
}

// The absolute error of each element in fp64, as one vector.
at::Tensor errors(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& exact) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < params.size(); ++i) {
    result.push_back((params[i].detach().to(at::kDouble) - exact[i].detach()).abs());
  }
  return torch::cat(result);
}

void expect_close(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs, double tolerance) {
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LE((ours[i] - theirs[i]).norm().item<double>(), tolerance * theirs[i].norm().item<double>());
    EXPECT_FALSE(ours[i].to(at::kFloat).equal(parameters()[i]));
  }
}

TEST_P(OptimizerOfTorch, TakesTheSamePath) {
  expect_close(trained(parameters(), 20, GetParam().make_ours), trained(parameters(), 20, GetParam().make_theirs),
               1e-6);
}

TEST_P(OptimizerOfTorch, TakesTheSamePathInDoublePrecision) {
  expect_close(trained(doubles(parameters()), 100, GetParam().make_ours),
               trained(doubles(parameters()), 100, GetParam().make_theirs), 1e-13);
}

// Where the formula is short (Adagrad, RMSprop), most of either error is the rounding of the parameter at the end of
// each step, which is common to both. The means over finitely many elements then differ by chance, and differently on
// every instruction set, because torch's kernels round differently there: 4,000 elements of Adagrad had 1.0015 times
// torch's error with AVX-512, 40,000 have 0.998 times. So an excess counts only from three of its standard errors on.
TEST_P(OptimizerOfTorch, IsNoLessExactOver100Steps) {
  const auto exact = trained(doubles(many_parameters()), 100, GetParam().make_theirs);
  const at::Tensor ours = errors(trained(many_parameters(), 100, GetParam().make_ours), exact);
  const at::Tensor theirs = errors(trained(many_parameters(), 100, GetParam().make_theirs), exact);
  const at::Tensor excess = ours - theirs;
  const double mean = excess.mean().item<double>();
  const double standard_error = excess.std().item<double>() / std::sqrt(static_cast<double>(excess.numel()));
  const std::string ratio = std::to_string(ours.sum().item<double>() / theirs.sum().item<double>());
  RecordProperty("error_to_torchs", ratio);
  EXPECT_LE(mean, 3 * standard_error) << "ours / theirs: " << ratio;
}

INSTANTIATE_TEST_SUITE_P(
    , OptimizerOfTorch,
    ::testing::Values(
        Pair{"Adam",
             [](auto params) { return optim::Adam(params, {.lr = 0.1, .betas = {0.8, 0.95}, .weight_decay = 0.1}); },
             [](auto params) {
               return std::make_unique<torch::optim::Adam>(
                   params, torch::optim::AdamOptions(0.1).betas({0.8, 0.95}).weight_decay(0.1));
             }},
        Pair{"AdamW", [](auto params) { return optim::AdamW(params, {.lr = 0.1, .weight_decay = 0.1}); },
             [](auto params) {
               return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.1).weight_decay(0.1));
             }},
        Pair{"AdamWByDefault", [](auto params) { return optim::AdamW(params); },
             [](auto params) { return std::make_unique<torch::optim::AdamW>(params); }},
        Pair{"SGD", [](auto params) { return optim::SGD(params, {.lr = 0.1}); },
             [](auto params) { return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1)); }},
        Pair{"SGDWithDampening",
             [](auto params) {
               return optim::SGD(params, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1});
             },
             [](auto params) {
               return std::make_unique<torch::optim::SGD>(
                   params, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5).weight_decay(0.1));
             }},
        Pair{"Nesterov", [](auto params) { return optim::SGD(params, {.lr = 0.1, .momentum = 0.9, .nesterov = true}); },
             [](auto params) {
               return std::make_unique<torch::optim::SGD>(params,
                                                          torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
             }},
        Pair{"Adagrad",
             [](auto params) {
               return optim::Adagrad(
                   params, {.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1, .initial_accumulator_value = 0.1});
             },
             [](auto params) {
               return std::make_unique<torch::optim::Adagrad>(
                   params,
                   torch::optim::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.1));
             }},
        Pair{"RMSprop", [](auto params) { return optim::RMSprop(params); },
             [](auto params) { return std::make_unique<torch::optim::RMSprop>(params); }},
        Pair{"CenteredRMSprop",
             [](auto params) {
               return optim::RMSprop(params, {.weight_decay = 0.1, .momentum = 0.5, .centered = true});
             },
             [](auto params) {
               return std::make_unique<torch::optim::RMSprop>(
                   params, torch::optim::RMSpropOptions().weight_decay(0.1).momentum(0.5).centered(true));
             }}),
    [](const auto& test) { return test.param.name; });

// ---- Our optimizers without a counterpart in torch: their papers' formulas, element by element in fp64.

// Calls update(p, g, step) for each parameter, as vectors of numbers, and expects the same from the optimizers of
// `make`.
template <class Update>
void expect_formula(const std::function<Optimizers(std::vector<at::Tensor>)>& make, const Update& update,
                    double tolerance) {
  const auto ours = trained(parameters(), 20, make);
  auto initial = parameters();
  for (size_t i = 0; i < initial.size(); ++i) {
    const auto param = doubles({initial[i]})[0].detach();
    auto state = update();
    for (int step = 0; step < 20; ++step) {
      set_gradients(initial, step);
      state(param, initial[i].grad().to(at::kDouble), step + 1);
    }
    EXPECT_LE((ours[i].detach() - param).norm().template item<double>(),
              tolerance * param.norm().template item<double>());
  }
}

TEST(Lion, FollowsThePaper) {
  expect_formula([](auto params) { return optim::Lion(params, {.lr = 0.01, .weight_decay = 0.1}); },
                 [] {
                   return [m = at::Tensor()](at::Tensor p, const at::Tensor& g, int step) mutable {
                     if (step == 1) m = torch::zeros_like(p);
                     const at::Tensor c = 0.9 * m + 0.1 * g;
                     p.sub_(0.01 * (c.sign() + 0.1 * p));
                     m = 0.99 * m + 0.01 * g;
                   };
                 },
                 1e-6);
}

TEST(LAMB, FollowsThePaper) {
  expect_formula([](auto params) { return optim::LAMB(params, {.lr = 0.01, .weight_decay = 0.1}); },
                 [] {
                   return [m = at::Tensor(), v = at::Tensor()](at::Tensor p, const at::Tensor& g, int t) mutable {
                     if (t == 1) m = torch::zeros_like(p), v = torch::zeros_like(p);
                     m = 0.9 * m + 0.1 * g;
                     v = 0.999 * v + 0.001 * g * g;
                     const at::Tensor r = (m / (1 - std::pow(0.9, t))) / ((v / (1 - std::pow(0.999, t))).sqrt() + 1e-6);
                     const at::Tensor u = r + 0.1 * p;
                     p.sub_(0.01 * (p.norm() / u.norm()) * u);
                   };
                 },
                 1e-6);
}

TEST(LARS, FollowsThePaper) {
  expect_formula([](auto params) { return optim::LARS(params, {.weight_decay = 0.1, .trust_coefficient = 0.1}); },
                 [] {
                   return [b = at::Tensor()](at::Tensor p, const at::Tensor& g, int step) mutable {
                     if (step == 1) b = torch::zeros_like(p);
                     const at::Tensor local_lr = 0.1 * p.norm() / (g.norm() + 0.1 * p.norm() + 1e-8);
                     b = 0.9 * b + local_lr * (g + 0.1 * p);
                     p.sub_(0.1 * b);
                   };
                 },
                 1e-6);
}

// The square of a gradient of 1 is so much larger than that of the next ones that a sum with it would lose these.
TEST(ElementWiseOptimizers, WithoutAMemoryHaveNoTraceOfALargeGradient) {
  const auto moved_by = [](const auto& make) {
    const at::Tensor param = torch::zeros({1}, at::kFloat).requires_grad_();
    const Optimizers optimizers = make(std::vector<at::Tensor>{param});
    for (const double gradient : {1.0, 1e-5, 1e-5}) {
      param.mutable_grad() = torch::full({1}, gradient, at::kFloat);
      optimizers[0].step();
    }
    return param.item<double>();
  };
  EXPECT_NEAR(moved_by([](auto params) { return optim::RMSprop(params, {.lr = 1e-3, .alpha = 0.0}); }), -3e-3, 1e-5);
  EXPECT_NEAR(moved_by([](auto params) { return optim::AdamW(params, {.lr = 1e-3, .betas = {0.0, 0.0}}); }), -3e-3,
              1e-5);
  EXPECT_NEAR(moved_by([](auto params) { return optim::Lion(params, {.lr = 1e-3, .betas = {0.0, 0.0}}); }), -3e-3,
              1e-5);
}

TEST(LARS, ATensorOfZerosMovesAsWithSGD) {
  const at::Tensor zeros = torch::zeros({3}).requires_grad_(), still = torch::ones({3}).requires_grad_();
  Optimizers optimizers = optim::LARS({zeros, still}, {.lr = 0.5});
  zeros.mutable_grad() = torch::ones({3});
  still.mutable_grad() = torch::zeros({3});
  optimizers[0].step();
  EXPECT_TRUE(zeros.equal(torch::full({3}, -0.5)));
  EXPECT_TRUE(still.equal(torch::ones({3})));
}

// Every kind of optimizer, for tests of their common behaviour.
struct Kind {
  const char* name;
  std::function<Optimizers(std::vector<ParamGroup>)> make;
};

class EveryOptimizer : public ::testing::TestWithParam<Kind> {};

TEST_P(EveryOptimizer, LeavesAParameterWithoutGradientAlone) {
  const auto params = parameters(), alone = parameters();
  const Optimizers both = GetParam().make(one_group(params));
  const Optimizers one = GetParam().make(one_group({alone[1]}));
  for (int step = 0; step < 3; ++step) {
    set_gradients(params, step);
    set_gradients(alone, step);
    params[0].mutable_grad().reset();
    if (step == 1) params[1].mutable_grad().reset();  // skips its second step, so its own count lags by one
    for (const auto& optimizer : both) optimizer->step();
    if (step != 1) {
      for (const auto& optimizer : one) optimizer->step();
    }
  }
  EXPECT_TRUE(params[0].equal(parameters()[0]));
  EXPECT_TRUE(params[1].equal(alone[1]));
}

TEST_P(EveryOptimizer, GroupsHaveTheirOwnSettings) {
  const auto params = parameters();
  const Optimizers optimizers = GetParam().make({{.params = {params[0]}, .lr = 0.0}, {.params = {params[1]}}});
  set_gradients(params, 0);
  for (const auto& optimizer : optimizers) optimizer->step();
  EXPECT_TRUE(params[0].equal(parameters()[0]));
  EXPECT_FALSE(params[1].equal(parameters()[1]));
}

TEST_P(EveryOptimizer, UpdatesATiedParameterOnce) {
  const auto once = parameters(), twice = parameters();
  const Optimizers single = GetParam().make(one_group({once[2]}));
  const Optimizers tied = GetParam().make(one_group({twice[2], twice[2]}));
  set_gradients(once, 0);
  set_gradients(twice, 0);
  for (const auto& optimizer : single) optimizer->step();
  for (const auto& optimizer : tied) optimizer->step();
  EXPECT_TRUE(once[2].equal(twice[2]));
}

TEST_P(EveryOptimizer, ZeroGradDropsTheGradients) {
  const auto params = parameters();
  const Optimizers optimizers = GetParam().make(one_group(params));
  set_gradients(params, 0);
  for (const auto& optimizer : optimizers) optimizer->zero_grad();
  EXPECT_FALSE(params[0].grad().defined());
}

TEST_P(EveryOptimizer, RefusesBadParameters) {
  const auto params = parameters();
  const auto refusal = [](const std::vector<ParamGroup>& groups) {
    return message_of<UsageError>([&] { GetParam().make(groups); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("no parameter to update"));
  EXPECT_THAT(refusal(one_group({at::Tensor()})), HasSubstr("undefined"));
  EXPECT_THAT(refusal({{.params = params}, {.params = {params[1]}}}),
              HasSubstr("groups 0 and 1 have a parameter in common"));
  EXPECT_THAT(refusal({{.params = params, .lr = -1.0}}), HasSubstr("lr must be at least 0; got -1"));
}

TEST_P(EveryOptimizer, TransformsTheGradientsBeforeTheUpdate) {
  const auto inside = parameters(), before = parameters();
  const Optimizers ours = GetParam().make(one_group(inside)), plain = GetParam().make(one_group(before));
  for (int step = 0; step < 3; ++step) {
    set_gradients(inside, step);
    set_gradients(before, step);
    for (const at::Tensor& param : before) param.mutable_grad().mul_(0.3).clamp_(-0.2, 0.2);
    ours[0].step({.factor = torch::tensor(0.3, at::kDouble), .clip_value = 0.2});
    plain[0].step();
  }
  for (size_t i = 0; i < inside.size(); ++i) EXPECT_TRUE(inside[i].allclose(before[i], 1e-6, 1e-8));
}

// A checkpoint has the elements in the order of the parameter's memory.
TEST_P(EveryOptimizer, ItsStateHasTheStridesOfTheParameterWhateverThoseOfTheGradient) {
  const at::Tensor param = torch::rand({3, 5}).t().requires_grad_();
  const Optimizers optimizers = GetParam().make(one_group({param}));
  param.mutable_grad() = torch::rand({5, 3});
  optimizers[0].step();
  for (const auto& [name, tensor] : optimizers[0].parameter_state(0, 0).tensors) {
    EXPECT_EQ(tensor.strides(), param.strides()) << name;
  }
}

TEST_P(EveryOptimizer, TakesParametersOfAnyStrides) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const at::Tensor values = torch::randn({6, 8}, generator), gradient = torch::randn({6, 8}, generator);
  const std::vector<std::pair<const char*, at::Tensor>> layouts{
      {"contiguous", values.clone()},
      {"transposed", values.t().contiguous().t()},
      {"with gaps", torch::zeros({6, 16}).slice(1, 0, 16, 2).copy_(values)},
  };
  for (const auto& [name, layout] : layouts) {
    for (const at::Tensor& grad : {gradient, gradient.t().contiguous().t()}) {
      const at::Tensor plain = values.clone().requires_grad_(), param = layout.detach().requires_grad_();
      const Optimizers expected = GetParam().make(one_group({plain})), optimizers = GetParam().make(one_group({param}));
      for (int step = 0; step < 3; ++step) {
        plain.mutable_grad() = gradient.clone();
        param.mutable_grad() = grad.clone();
        expected[0].step();
        optimizers[0].step();
      }
      EXPECT_TRUE(param.allclose(plain, 1e-6, 1e-8)) << name;
      EXPECT_EQ(param.strides(), layout.strides()) << name;
      layout.copy_(values);
    }
  }
}

TEST_P(EveryOptimizer, AGroupThatIsAddedTrainsFromThenOnByItsOwnSettings) {
  const auto params = parameters();
  const Optimizers optimizers = GetParam().make(one_group({params[0]}));
  Optimizer& optimizer = optimizers[0];
  for (const at::Tensor& param : params) param.mutable_grad() = torch::ones_like(param);
  optimizer.step();
  const at::Tensor before = params[1].detach().clone();
  optimizer.add_param_group({.params = {params[1]}, .lr = 0.0});
  optimizer.step();
  EXPECT_TRUE(params[1].equal(before));
  optimizer.groups()[1].lr = 0.1;
  optimizer.step();
  EXPECT_FALSE(params[1].equal(before));
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.add_param_group({.params = {params[0]}}); }),
              HasSubstr("groups 0 and 2 have a parameter in common"));
  EXPECT_THAT(message_of<UsageError>([&] { optimizer.add_param_group({}); }), HasSubstr("has no parameter"));
}

// An element-wise optimizer has a master of 32 bits, any other rounds the parameter in every step.
TEST_P(EveryOptimizer, UpdatesA16BitParameterInSinglePrecision) {
  const at::Tensor single = torch::randn({100}).to(at::kBFloat16).to(at::kFloat).requires_grad_();
  const at::Tensor half = single.detach().to(at::kBFloat16).requires_grad_();
  const Optimizers singles = GetParam().make(one_group({single})), halves = GetParam().make(one_group({half}));
  for (int step = 0; step < 3; ++step) {
    half.mutable_grad() = torch::randn({100}).to(at::kBFloat16);
    single.mutable_grad() = half.grad().to(at::kFloat);
    singles[0].step();
    halves[0].step();
    const at::Tensor rounded = single.detach().to(at::kBFloat16);
    EXPECT_TRUE(half.equal(rounded)) << "step " << step;
    const c10::NoGradGuard no_grad;
    if (!halves[0].is_element_wise()) single.copy_(rounded);
  }
  EXPECT_EQ(half.scalar_type(), at::kBFloat16);
}

TEST_P(EveryOptimizer, ChangesAreNoticedByAutograd) {
  const at::Tensor param = torch::ones({3}).requires_grad_();
  const Optimizers optimizers = GetParam().make(one_group({param}));
  const at::Tensor loss = (param * param).sum();
  param.mutable_grad() = torch::ones({3});
  optimizers[0].step();
  EXPECT_THAT(message_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

const Kind kElementWise[] = {
    {"Adam", [](auto groups) { return optim::Adam(groups); }},
    {"AdamW", [](auto groups) { return optim::AdamW(groups); }},
    {"SGD", [](auto groups) { return optim::SGD(groups, {.momentum = 0.9}); }},
    {"Adagrad", [](auto groups) { return optim::Adagrad(groups); }},
    {"RMSprop", [](auto groups) { return optim::RMSprop(groups); }},
    {"Lion", [](auto groups) { return optim::Lion(groups); }},
};
const Kind kWholeTensor[] = {
    {"LAMB", [](auto groups) { return optim::LAMB(groups); }},
    {"LARS", [](auto groups) { return optim::LARS(groups); }},
};
const auto kind_name = [](const auto& test) { return std::string(test.param.name); };

INSTANTIATE_TEST_SUITE_P(ElementWise, EveryOptimizer, ::testing::ValuesIn(kElementWise), kind_name);
INSTANTIATE_TEST_SUITE_P(WholeTensor, EveryOptimizer, ::testing::ValuesIn(kWholeTensor), kind_name);

// ---- Optimizers with an update rule.

const Kind kWithAllOptions[] = {
    {"Adam", [](auto groups) { return optim::Adam(groups, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"AdamW", [](auto groups) { return optim::AdamW(groups, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"SGD", [](auto groups) { return optim::SGD(groups, {.lr = 0.1, .weight_decay = 0.1}); }},
    {"Momentum", [](auto groups) { return optim::SGD(groups, {.lr = 0.1, .momentum = 0.9, .dampening = 0.2}); }},
    {"Nesterov", [](auto groups) { return optim::SGD(groups, {.lr = 0.1, .momentum = 0.9, .nesterov = true}); }},
    {"Adagrad", [](auto groups) { return optim::Adagrad(groups, {.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1}); }},
    {"RMSprop",
     [](auto groups) {
       return optim::RMSprop(groups, {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9, .centered = true});
     }},
    {"Lion", [](auto groups) { return optim::Lion(groups, {.lr = 0.01, .weight_decay = 0.1}); }},
};

class ElementWiseOptimizer : public ::testing::TestWithParam<Kind> {};

TEST_P(ElementWiseOptimizer, DoesTheSameWithTorchsOperations) {
  const auto ours = parameters(), theirs = parameters();
  const Optimizers kernel = GetParam().make(one_group(ours)), operations = GetParam().make(one_group(theirs));
  for (int step = 0; step < 20; ++step) {
    set_gradients(ours, step);
    set_gradients(theirs, step);
    if (step % 3 == 1) {  // gives the parameters different counts of updates
      ours[1].mutable_grad().reset();
      theirs[1].mutable_grad().reset();
    }
    GradientTransform transform{.factor = torch::tensor(0.3, at::kDouble)};
    if (step % 2) transform.clip_value = 0.2;
    kernel[0].step(transform);
    dynamic_cast<optim::ElementWiseOptimizer&>(operations[0]).step_with_torch(transform);
  }
  expect_close(ours, theirs, 1e-6);
}

// Copies are fp32, so that the error of a gradient that is divided in 16 bits would be seen: 1e-3 of an update.
TEST_P(ElementWiseOptimizer, CopiesTheSameWithTorchsOperations) {
  using optim::PredictBy;
  for (const PredictBy by : {PredictBy::none, PredictBy::gradient, PredictBy::moments, PredictBy::repeat}) {
    for (const bool clips : {false, true}) {
      SCOPED_TRACE(static_cast<int>(by));
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
      const auto draw = [&] { return torch::randn({100}, generator).to(at::kBFloat16); };
      const at::Tensor values = draw();
      const auto optimizer = [&] { return GetParam().make(one_group({values.clone()})); };
      const Optimizers kernel = optimizer(), operations = optimizer();
      const std::vector<at::Tensor> copy_of_kernel{torch::zeros({100})}, copy_of_operations{torch::zeros({100})};
      GradientTransform transform{.factor = torch::tensor(0.3, at::kDouble)};
      if (clips) transform.clip_value = 0.2;
      for (int step = 0; step < 5; ++step) {
        const at::Tensor gradient = draw();
        const auto group_of = [&](const Optimizers& all, at::ScalarType dtype) -> Optimizer::Group& {
          Optimizer::Group& group = all[0].groups()[0];
          group.params[0].mutable_grad() = gradient.to(dtype, /*non_blocking=*/false, /*copy=*/true);
          return group;
        };
        const auto states_of = [](const Optimizers& all) -> optim::ElementWiseOptimizer& {
          return dynamic_cast<optim::ElementWiseOptimizer&>(all[0]);
        };
        Optimizer::Group& ours = group_of(kernel, at::kFloat);
        const double next_lr = 1.5 * ours.lr;
        const optim::ElementWiseOptimizer::Copies by_kernel{.tensors = copy_of_kernel, .by = by, .next_lr = next_lr};
        states_of(kernel).update(ours, ours.params, states_of(kernel).states(0), transform, &by_kernel);
        Optimizer::Group& theirs = group_of(operations, at::kBFloat16);
        const optim::ElementWiseOptimizer::Copies by_torch{.tensors = copy_of_operations, .by = by, .next_lr = next_lr};
        states_of(operations)
            .update_and_copy_with_torch(theirs, theirs.params, states_of(operations).states(0), transform, by_torch);
        expect_close(copy_of_kernel, copy_of_operations, 1e-6);
      }
      const auto master = [](const Optimizers& all) { return all[0].parameter_state(0, 0).tensor("master"); };
      expect_close({master(kernel)}, {master(operations)}, 1e-6);
      EXPECT_EQ(copy_of_kernel[0].equal(master(kernel)), by == PredictBy::none);
    }
  }
}

// The bound is that of one tensor, its gradient, three states, and temporaries; the optimizer has 16 tensors.
TEST_P(ElementWiseOptimizer, APredictionWithTorchsOperationsCopiesOneTensorAtATime) {
  using optim::PredictBy;
  constexpr int64_t kNumElements = 1 << 16;
  for (const PredictBy by : {PredictBy::gradient, PredictBy::moments, PredictBy::repeat}) {
    std::vector<at::Tensor> params, copies;
    for (int i = 0; i < 16; ++i) {
      params.push_back(torch::ones({kNumElements}));
      copies.push_back(torch::zeros({kNumElements}));
      params.back().mutable_grad() = torch::ones({kNumElements});
    }
    const Optimizers optimizers = GetParam().make(one_group(params));
    auto& optimizer = dynamic_cast<optim::ElementWiseOptimizer&>(optimizers[0]);
    const Optimizer::Group& group = optimizer.groups()[0];
    const auto update = [&] {
      optimizer.update_and_copy_with_torch(group, params, optimizer.states(0),
                                           {.factor = torch::tensor(0.3, at::kDouble)},
                                           {.tensors = copies, .by = by, .next_lr = group.lr});
    };
    update();  // makes the states
    testing::CountingAllocator memory;
    memory.reset_peak();
    const int64_t before = memory.live();
    update();
    EXPECT_LE(memory.peak() - before, 9 * kNumElements * static_cast<int64_t>(sizeof(float))) << static_cast<int>(by);
  }
}

TEST_P(ElementWiseOptimizer, RefusesASparseGradient) {
  const at::Tensor param = torch::ones({3}).requires_grad_();
  const Optimizers optimizers = GetParam().make(one_group({param}));
  param.mutable_grad() = torch::ones({3}).to_sparse();
  EXPECT_THAT(message_of<SetupError>([&] { optimizers[0].step(); }), HasSubstr("a gradient is sparse"));
}

INSTANTIATE_TEST_SUITE_P(, ElementWiseOptimizer, ::testing::ValuesIn(kWithAllOptions), kind_name);

TEST(Optimizers, SayWhetherTheyAreElementWise) {
  const auto is_element_wise = [](const Kind& kind) { return kind.make(one_group(parameters()))[0].is_element_wise(); };
  for (const Kind& kind : kElementWise) EXPECT_TRUE(is_element_wise(kind)) << kind.name;
  for (const Kind& kind : kWholeTensor) EXPECT_FALSE(is_element_wise(kind)) << kind.name;
}

TEST(Optimizers, RefuseOptionsOutOfRange) {
  const auto params = parameters();
  EXPECT_THAT(message_of<UsageError>([&] { optim::AdamW adamw(params, {.lr = -1}); }),
              HasSubstr("AdamW: lr must be at least 0"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::Adam adam(params, {.betas = {0.9, 1.0}}); }),
              HasSubstr("Adam: betas: element 1 must be at most"));
  EXPECT_THAT(message_of<UsageError>([&] { optim::SGD sgd(params, {.nesterov = true}); }),
              HasSubstr("nesterov needs momentum"));
}

}  // namespace
}  // namespace fulgur
