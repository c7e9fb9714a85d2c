// Updates one step late, compared with the recurrence written out.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <set>
#include <thread>

#include "fulgur/base/autocast.h"
#include "fulgur/base/error.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/distributed/world.h"
#include "fulgur/optim/adagrad.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/rmsprop.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/strategies/strategy_choice.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using testing::Case;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Net;
using ::testing::Not;
using testing::run_ranks;
using testing::TinyModule;
using testing::train;

const std::vector<std::string> kBases{"single_device", "ddp", "ddp_sharded", "zero_offload"};

TEST(DelayedUpdateTest, IsItsBaseBitForBitWhileItWarmsUp) {
  for (const std::string& base : kBases) {
    for (const int64_t world_size : {1, 2}) {
      if (base == "single_device" && world_size > 1) continue;
      for (const Case& c : {Case{}, Case{.accumulate = 2, .clip = 0.05}, Case{.precision = "bf16-true"},
                            Case{.accumulate = 2, .precision = "bf16-true"}}) {
        run_ranks(world_size, [&](World& world) {
          const at::Tensor expected = train<Net<optim::AdamW>>(world, c, base);
          const DelayedUpdate delayed{.base = base, .warmup_steps = 1000, .reduce = "each_micro_batch"};
          EXPECT_TRUE(train<Net<optim::AdamW>>(world, c, delayed).equal(expected)) << base << world_size;
        });
      }
    }
  }
}

constexpr double kLr = 1e-2, kGamma = 0.5;
constexpr int64_t kEvery = 3;  // steps between changes of the learning rate

struct Plan {
  std::string base{};
  int64_t accumulate = 1;
  double clip = 0;
  int64_t warmup = 0;
  int64_t world_size = 1;
  double ratio = 1;
  bool bf16 = false;  // precision bf16-true
  std::string predict = "gradient";
  std::set<size_t> overflows_at{};  // micro-batches, counted over all ranks; unless empty, precision is 16-mixed
  double lr = kLr, gamma = kGamma;  // the learning rate at first, and its factor every kEvery steps
  int64_t validates_every = 0;      // batches; 0: no validation

  const char* precision() const { return bf16 ? "bf16-true" : (overflows_at.empty() ? "32" : "16-mixed"); }
};

constexpr double kOverflow = 1e37;  // times the loss scale it exceeds fp32

// The optimizers of the tests. rule() writes out the coefficients of the t-th update from the same options
// (optim/update_rules.h has the formulas), kSlots are the states that it uses, and kIsPredicted says whether it has the
// momentum that a prediction needs.
struct ByAdamW {
  static optim::AdamW make(std::vector<at::Tensor> params, double lr) {
    return optim::AdamW(std::move(params), {.lr = lr, .betas = {0.8, 0.95}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t) {
    const auto n = static_cast<double>(t);
    return optim::AdamRule{.one_minus_beta1 = 1.0 - 0.8,
                           .one_minus_beta2 = 1.0 - 0.95,
                           .step_size = lr / (1.0 - std::pow(0.8, n)),
                           .inv_root_bias_correction2 = 1.0 / std::sqrt(1.0 - std::pow(0.95, n)),
                           .decay = lr * 0.1};
  }
  static constexpr size_t kSlots[] = {0, 1};
  static constexpr bool kIsPredicted = true;
};
struct ByAdam {
  static optim::Adam make(std::vector<at::Tensor> params, double lr) {
    return optim::Adam(std::move(params), {.lr = lr, .betas = {0.8, 0.95}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t) {
    optim::Rule rule = ByAdamW::rule(lr, t);
    std::get<optim::AdamRule>(rule).decay = 0.0;
    std::get<optim::AdamRule>(rule).l2 = 0.1;
    return rule;
  }
  static constexpr size_t kSlots[] = {0, 1};
  static constexpr bool kIsPredicted = true;
};
struct ByLion {
  static optim::Lion make(std::vector<at::Tensor> params, double lr) {
    return optim::Lion(std::move(params), {.lr = lr, .betas = {0.9, 0.8}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t) {
    return optim::LionRule{.lr = lr, .one_minus_beta1 = 1.0 - 0.9, .one_minus_beta2 = 1.0 - 0.8, .decay = lr * 0.1};
  }
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByMomentum {
  static optim::SGD make(std::vector<at::Tensor> params, double lr) {
    return optim::SGD(std::move(params), {.lr = lr, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t) {
    return optim::SGDRule{.lr = lr, .momentum = 0.9, .one_minus_dampening = t == 1 ? 1.0 : 1.0 - 0.2, .l2 = 0.1};
  }
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByNesterov {
  static optim::SGD make(std::vector<at::Tensor> params, double lr) {
    return optim::SGD(std::move(params), {.lr = lr, .momentum = 0.9, .nesterov = true});
  }
  static optim::Rule rule(double lr, int64_t) { return optim::SGDRule{.lr = lr, .momentum = 0.9, .nesterov = true}; }
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByRMSpropWithMomentum {
  static optim::RMSprop make(std::vector<at::Tensor> params, double lr) {
    return optim::RMSprop(std::move(params), {.lr = lr, .alpha = 0.9, .momentum = 0.5, .centered = true});
  }
  static optim::Rule rule(double lr, int64_t) {
    return optim::RMSpropRule{.lr = lr, .one_minus_alpha = 1.0 - 0.9, .momentum = 0.5};
  }
  static constexpr size_t kSlots[] = {0, 1, 2};
  static constexpr bool kIsPredicted = true;
};
struct ByRMSprop {
  static optim::RMSprop make(std::vector<at::Tensor> params, double lr) {
    return optim::RMSprop(std::move(params), {.lr = lr, .alpha = 0.9});
  }
  static optim::Rule rule(double lr, int64_t) { return optim::RMSpropRule{.lr = lr, .one_minus_alpha = 1.0 - 0.9}; }
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = false;
};
struct ByAdagrad {
  static optim::Adagrad make(std::vector<at::Tensor> params, double lr) {
    return optim::Adagrad(std::move(params), {.lr = lr, .lr_decay = 0.1, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t) {
    return optim::AdagradRule{.lr = lr / (1.0 + static_cast<double>(t - 1) * 0.1), .l2 = 0.1};
  }
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = false;
};
struct BySGD {
  static optim::SGD make(std::vector<at::Tensor> params, double lr) {
    return optim::SGD(std::move(params), {.lr = lr, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t) { return optim::SGDRule{.lr = lr, .l2 = 0.1}; }
  static constexpr std::array<size_t, 0> kSlots{};
  static constexpr bool kIsPredicted = false;
};

// A module that keeps its batches and, if requested, the weights that its hooks see.
template <class O>
struct Recorded : TinyModule {
  std::vector<Batch> batches;
  Plan plan{};
  size_t rank = 0;
  std::vector<at::Tensor> at_batch_ends{}, evaluated_at_batch_ends{}, at_validations{}, at_epoch_ends{};
  Recorded() { seed(*this); }
  static void seed(torch::nn::Module& module) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : module.parameters()) parameter.normal_(0, 0.5, generator);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const bool overflows = plan.overflows_at.contains(batches.size() * static_cast<size_t>(plan.world_size) + rank);
    batches.push_back(batch);
    const at::Tensor loss = TinyModule::training_step(batch, batch_idx);
    return overflows ? loss * kOverflow : loss;
  }
  Optimizers configure_optimizers() override {
    return {O::make(parameters(), plan.lr),
            {.scheduler = optim::StepLR::make({.step_size = kEvery, .gamma = plan.gamma}), .interval = "step"}};
  }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
    if (plan.validates_every == 0) return;
    at_batch_ends.push_back(testing::flat_weights(*this));
    with_evaluated_weights([&] { evaluated_at_batch_ends.push_back(testing::flat_weights(*this)); });
    EXPECT_TRUE(testing::flat_weights(*this).equal(at_batch_ends.back()));
  }
  void on_validation_start() override { at_validations.push_back(testing::flat_weights(*this)); }
  void on_train_epoch_end() override { at_epoch_ends.push_back(testing::flat_weights(*this)); }
};

// What happens to the update in progress when the gradients of the next step overflow. Only is_applied is right.
enum class OnOverflow { is_applied, is_lost, stays_under_way };

struct Recurrence {
  std::vector<at::Tensor> params{};
  std::vector<at::Tensor> evaluated{};  // after n steps, n from 0: the weights with all updates
  int64_t global_step = 0;
  int64_t skipped_beside_an_update = 0;  // steps that overflow while an update is in progress
};

// The gradients of a step, and how its update uses them.
struct Gradients {
  std::vector<at::Tensor> sums{};
  optim::GradientScaling scaling{};
  double lr = 0.0;
};

// Parameters and states as plain tensors, which are updated by the rule of O.
template <class O>
struct Plain {
  using States = std::array<at::Tensor, optim::kMaxStates>;
  std::vector<at::Tensor> params{};  // fp32
  std::vector<States> states{};
  int64_t num_updates = 0;

  explicit Plain(const std::vector<at::Tensor>& values) {
    for (const at::Tensor& value : values) {
      params.push_back(value.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
      States& own = states.emplace_back();
      for (const size_t slot : O::kSlots) own[slot] = torch::zeros_like(params.back());
    }
  }

  Plain clone() const {
    Plain copy = *this;
    for (at::Tensor& param : copy.params) param = param.clone();
    for (States& own : copy.states) {
      for (at::Tensor& state : own) state = state.defined() ? state.clone() : state;
    }
    return copy;
  }

  void update(const Gradients& by) {
    const optim::Rule rule = O::rule(by.lr, ++num_updates);
    for (size_t i = 0; i < params.size(); ++i) fused(rule, params[i], states[i], by.sums[i], by.scaling);
  }

  // The parameters plus the update that is expected after that by `last`, before which they were `before`.
  Plain ahead(const std::string& predict, const Gradients& last, double next_lr, const Plain& before) const {
    Plain result = clone();
    if (!O::kIsPredicted || predict == "none") return result;
    if (predict == "repeat") {
      const optim::SGDRule again{.lr = -std::min(next_lr / last.lr, 2.0)};
      for (size_t i = 0; i < params.size(); ++i) fused(again, result.params[i], {}, params[i] - before.params[i], {});
    } else {
      Gradients next = last;
      next.lr = next_lr;
      if (predict == "moments") {
        for (at::Tensor& sum : next.sums) sum = torch::zeros_like(sum);
      }
      result.update(next);
    }
    return result;
  }

  // In the dtype of a module's parameters.
  void write_to(const std::vector<at::Tensor>& parameters) const {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) at::Tensor(parameters[i]).copy_(params[i]);
  }

 private:
  static void fused(const optim::Rule& rule, const at::Tensor& param, const States& states, const at::Tensor& gradient,
                    const optim::GradientScaling& scaling) {
    optim::Slice<float> slice{.param = param.mutable_data_ptr<float>(),
                              .grad = gradient.const_data_ptr(),
                              .grad_type = gradient.scalar_type(),
                              .num_elements = param.numel()};
    for (size_t k = 0; k < states.size(); ++k) {
      if (states[k].defined()) slice.states[k] = states[k].mutable_data_ptr<float>();
    }
    optim::fused_update(rule, slice, scaling);
  }
};

// theta_{i+1} uses g_{i-1}, with the settings of step i-1; the first updates are synchronous. A step whose gradients
// overflow has no update and is not counted. Forward sees theta_{i+1} and, if another update follows that theta_{i+1}
// lacks, the one that is expected by its learning rate. Each of two epochs ends with all its updates.
template <class O>
Recurrence recurrence(const std::vector<Batch>& batches, const Plan& plan,
                      OnOverflow on_overflow = OnOverflow::is_applied) {
  TinyModule net;  // has the parameters that training_step sees
  Recorded<O>::seed(net);
  if (plan.bf16) net.to(at::kBFloat16);
  Recurrence result;
  Plain<O> exact(net.parameters());
  const auto apply = [&](const Gradients& late, std::optional<double> next_lr = {}) {
    const Plain<O> before = exact.clone();
    exact.update(late);
    (next_lr ? exact.ahead(plan.predict, late, *next_lr, before) : exact).write_to(net.parameters());
  };
  const bool is_fp16 = !plan.overflows_at.empty();
  double lr = plan.lr, loss_scale = is_fp16 ? 65536.0 : 1.0;
  const auto backward = [&](size_t m) {
    at::Tensor loss;
    {
      std::optional<ScopedAutocast> autocast;
      if (is_fp16) autocast.emplace(AutocastState{at::kCPU, true, at::kHalf});
      loss = net.loss(batches[m]);
    }
    if (plan.overflows_at.contains(m)) loss = loss * kOverflow;
    (loss * loss_scale).backward();
  };
  std::optional<Gradients> pending;
  const auto add_evaluated = [&] {
    Plain<O> evaluated = exact.clone();
    if (pending) evaluated.update(*pending);
    TinyModule of_dtype;
    if (plan.bf16) of_dtype.to(at::kBFloat16);
    evaluated.write_to(of_dtype.parameters());
    result.evaluated.push_back(testing::flat_weights(of_dtype));
  };
  const int64_t window = plan.accumulate * plan.world_size;
  for (size_t begin = 0; begin < batches.size(); begin += static_cast<size_t>(window)) {
    if (pending && begin == batches.size() / 2) apply(*std::exchange(pending, std::nullopt));
    add_evaluated();
    Gradients now{.lr = lr};
    bool finite = true;
    for (int64_t k = 0; k < plan.accumulate; ++k) {  // sums over ranks first, then over micro-batches
      net.zero_grad();
      for (int64_t r = 0; r < plan.world_size; ++r) backward(begin + static_cast<size_t>(k * plan.world_size + r));
      const auto params = net.parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        const at::Tensor gradient = params[i].grad().clone();
        k == 0 ? now.sums.push_back(gradient) : void(now.sums[i] += gradient);
        finite = finite && gradient.isfinite().all().template item<bool>();
      }
    }
    if (!finite) {
      loss_scale *= 0.5;
      if (!pending) continue;
      ++result.skipped_beside_an_update;
      if (on_overflow == OnOverflow::is_applied) apply(*pending);
      if (on_overflow != OnOverflow::stays_under_way) pending.reset();
      continue;
    }
    const double mean = 1.0 / loss_scale / static_cast<double>(window);
    now.scaling.factor = mean;
    if (plan.clip > 0) {
      const at::Tensor norm = joint_norm(now.sums).mul(mean);
      now.scaling.factor = clip_coefficient(norm, plan.clip).mul(mean).template item<double>();
    }
    const bool is_late = result.global_step >= plan.warmup;
    if (pending) apply(*std::exchange(pending, std::nullopt), is_late ? std::optional(now.lr) : std::nullopt);
    is_late ? void(pending = now) : apply(now);
    if (++result.global_step % kEvery == 0) lr *= plan.gamma;
  }
  if (pending) apply(*std::exchange(pending, std::nullopt));
  add_evaluated();
  result.params = net.parameters();
  return result;
}

template <class O>
struct Trained {
  std::vector<at::Tensor> params{};
  int64_t global_step = 0;
  std::vector<Batch> batches{};  // batches of all ranks, in turn
  std::vector<std::shared_ptr<Recorded<O>>> modules{};
};

template <class O>
Trained<O> trained(const Plan& plan) {
  Trained<O> result;
  result.modules.resize(static_cast<size_t>(plan.world_size));
  run_ranks(plan.world_size, [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    const auto module = result.modules[rank] = make_module<Recorded<O>>();
    module->plan = plan;
    module->rank = rank;
    TrainerOptions options =
        testing::quiet({.strategy = DelayedUpdate{.base = plan.base,
                                                  .predict = plan.predict,
                                                  .warmup_steps = plan.warmup,
                                                  .host = {.ratio = plan.ratio, .update_threads = 2}},
                        .devices = plan.world_size,
                        .max_epochs = 2,
                        .num_sanity_val_steps = 0,
                        .precision = plan.precision(),
                        .accumulate_grad_batches = plan.accumulate,
                        .gradient_clip_val = plan.clip});
    LoaderList validation;
    if (plan.validates_every > 0) {
      options.val_check_interval = Batches(plan.validates_every);
      validation = testing::tiny_loader(8, 4);
    }
    Trainer trainer(options);
    trainer.fit(module, {.train = testing::tiny_loader(48, 4, /*shuffle=*/true), .val = validation});
    if (rank == 0) result.global_step = trainer.state().global_step;
  });
  result.params = result.modules.front()->parameters();
  for (size_t i = 0; i < result.modules.front()->batches.size(); ++i) {
    for (const auto& module : result.modules) result.batches.push_back(module->batches[i]);
  }
  return result;
}

bool are_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::ranges::equal(a, b, [](const at::Tensor& one, const at::Tensor& other) { return one.equal(other); });
}

template <class O>
void expect_recurrence(const Plan& plan) {
  SCOPED_TRACE(fmt::format("{}, predicted by {}, accumulate {}, clip {}, warm-up {}, {} ranks, ratio {}{}", plan.base,
                           plan.predict, plan.accumulate, plan.clip, plan.warmup, plan.world_size, plan.ratio,
                           plan.bf16 ? ", bf16" : ""));
  const Trained<O> got = trained<O>(plan);
  const Recurrence expected = recurrence<O>(got.batches, plan);
  EXPECT_EQ(got.global_step, expected.global_step);
  EXPECT_TRUE(are_equal(got.params, expected.params));
  if (got.global_step > plan.warmup + 1 && plan.predict != "none" && O::kIsPredicted && !plan.bf16) {  // may round it
    Plan unpredicted = plan;
    unpredicted.predict = "none";
    EXPECT_FALSE(are_equal(got.params, recurrence<O>(got.batches, unpredicted).params));
  }
  if (plan.overflows_at.empty()) return;
  EXPECT_GT(expected.skipped_beside_an_update, 0);
  for (const OnOverflow wrong : {OnOverflow::is_lost, OnOverflow::stays_under_way}) {
    EXPECT_FALSE(are_equal(got.params, recurrence<O>(got.batches, plan, wrong).params));
  }
}

// The oracle is recurrence(), which is written out above.
TEST(DelayedUpdateTest, IsTheRecurrenceBitForBit) {
  for (const std::string& base : kBases) {
    for (const int64_t accumulate : {1, 2}) {
      for (const double clip : {0.0, 0.1}) {
        for (const int64_t warmup : {0, 4}) {
          for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
            const Plan plan{.base = base, .accumulate = accumulate, .clip = clip, .warmup = warmup, .predict = predict};
            expect_recurrence<ByAdamW>(plan);
            expect_recurrence<ByMomentum>(plan);
          }
        }
      }
    }
  }
}

// A learning rate that rises threefold, where "repeat" expects no more than twice the last update.
TEST(DelayedUpdateTest, WithALearningRateThatRisesIsTheRecurrenceBitForBit) {
  for (const char* predict : {"gradient", "moments", "repeat"}) {
    const Plan plan{.base = "single_device", .predict = predict, .lr = 1e-5, .gamma = 3.0};
    expect_recurrence<ByAdamW>(plan);
    expect_recurrence<ByMomentum>(plan);
  }
}

template <class... Rules>
void expect_recurrences(const Plan& plan) {
  (expect_recurrence<Rules>(plan), ...);
}

TEST(DelayedUpdateTest, IsTheRecurrenceBitForBitByEveryRule) {
  for (const std::string base : {"single_device", "zero_offload"}) {
    for (const char* predict : {"gradient", "moments", "repeat"}) {
      for (const bool bf16 : {false, true}) {
        expect_recurrences<ByAdam, ByLion, ByNesterov, ByRMSpropWithMomentum, ByRMSprop, ByAdagrad, BySGD>(
            {.base = base, .clip = 0.1, .bf16 = bf16, .predict = predict});
      }
    }
  }
}

// The fp32 masters of the optimizer are delayed; the bf16 parameters are the masters, rounded.
TEST(DelayedUpdateTest, WithParametersOf16BitsIsTheRecurrenceBitForBit) {
  for (const std::string& base : kBases) {
    for (const double clip : {0.0, 0.1}) {
      for (const int64_t warmup : {0, 4}) {
        const Plan plan{.base = base, .clip = clip, .warmup = warmup, .bf16 = true};
        expect_recurrence<ByAdamW>(plan);
        expect_recurrence<ByMomentum>(plan);
      }
    }
  }
}

TEST(DelayedUpdateTest, WithAPartOnTheDeviceIsTheRecurrenceBitForBit) {
  for (const int64_t world_size : {1, 2}) {
    for (const double ratio : {0.0, 0.5}) {
      expect_recurrence<ByAdamW>(
          {.base = "zero_offload", .accumulate = 2, .warmup = 2, .world_size = world_size, .ratio = ratio});
    }
  }
}

// In fp16 the first steps overflow by themselves, too, because their loss scales are too large.
TEST(DelayedUpdateTest, AStepThatOverflowsSkipsItsOwnUpdateOnly) {
  for (const std::string& base : kBases) {
    for (const int64_t accumulate : {1, 2}) {
      for (const double clip : {0.0, 0.1}) {
        const Plan plan{
            .base = base, .accumulate = accumulate, .clip = clip, .warmup = 2, .overflows_at = {10, 14, 15}};
        expect_recurrence<ByAdamW>(plan);
        expect_recurrence<ByMomentum>(plan);
      }
    }
  }
}

TEST(DelayedUpdateTest, OnTwoRanksIsTheRecurrenceOfTheirSums) {
  for (const std::string base : {"ddp", "ddp_sharded", "zero_offload"}) {
    for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
      for (const bool bf16 : {false, true}) {
        for (const double clip : {0.0, 0.1}) {
          expect_recurrences<ByAdamW, ByMomentum>(
              {.base = base, .clip = clip, .warmup = 2, .world_size = 2, .bf16 = bf16, .predict = predict});
        }
      }
    }
    expect_recurrences<ByAdamW, ByMomentum>(
        {.base = base, .world_size = 2, .overflows_at = {15}});  // a micro-batch of rank 1
  }
  for (const std::string base : {"ddp_sharded", "zero_offload"}) {
    expect_recurrences<ByAdamW, ByMomentum>({.base = base, .accumulate = 2, .world_size = 2});
  }
}

TEST(DelayedUpdateTest, RanksHaveTheSameParametersWhateverTheBase) {
  at::Tensor expected;
  for (const std::string base : {"ddp", "ddp_sharded", "zero_offload"}) {
    run_ranks(2, [&](World& world) {
      const at::Tensor got =
          train<Net<optim::AdamW>>(world, {.clip = 0.05}, DelayedUpdate{.base = base, .warmup_steps = 0});
      const at::Tensor of_rank_0 = got.clone();
      world.data().broadcast(of_rank_0, 0).wait();
      EXPECT_TRUE(got.equal(of_rank_0)) << base << ", rank " << world.rank();
      if (world.rank() > 0) return;
      if (!expected.defined()) expected = got;
      EXPECT_TRUE(got.equal(expected)) << base;
    });
  }
}

// lambda/2 x^2 by SGD, with lambda = 1.
struct Quadratic : Module {
  at::Tensor x = register_parameter("x", torch::ones({1}));
  double lr, momentum;
  Quadratic(double its_lr, double its_momentum) : lr(its_lr), momentum(its_momentum) {}
  at::Tensor training_step(const Batch&, int64_t) override { return x.square().sum() * 0.5; }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = lr, .momentum = momentum}); }
};

double where_it_ends(double lr, const StrategyChoice& choice, double momentum, int64_t num_steps) {
  const auto module = make_module<Quadratic>(lr, momentum);
  Trainer(testing::quiet({.strategy = choice})).fit(module, {.train = testing::tiny_loader(num_steps, 1)});
  return module->x.abs().item<double>();
}

// With momentum m the update k is d_k = m d_{k-1} - lr g_k. On time g_k is the gradient at p_{k-1}, late at
// p_{k-2} + c d_{k-2} - b lr g_{k-2}: c and b are 0 without a prediction, (m, 1) with gradient, (m, 0) with moments,
// (1, 0) with repeat. On the quadratic all are linear recurrences, with a = lr * lambda: of the polynomials below.
std::vector<double> on_time(double a, double m) { return {1, -(1 + m) + a, m}; }
std::vector<double> late(double a, double m, double c, double b) {
  return {1, -(1 + m), m + a * (1 + c) + a * b, -a * c - a * b * (1 + m), a * b * m};
}

// The largest absolute value of a root; coefficients from the highest power on.
double spectral_radius(const std::vector<double>& polynomial) {
  const auto n = static_cast<int64_t>(polynomial.size()) - 1;
  const at::Tensor companion = torch::zeros({n, n}, at::kDouble);
  for (int64_t i = 0; i < n; ++i) companion[0][i] = -polynomial[static_cast<size_t>(i + 1)] / polynomial[0];
  for (int64_t i = 1; i < n; ++i) companion[i][i - 1] = 1.0;
  return at::linalg_eigvals(companion).abs().max().item<double>();
}

// Where the recurrence starts to diverge.
template <class Polynomial>
double largest_stable(const Polynomial& polynomial) {
  double stable = 1e-3;
  while (spectral_radius(polynomial(stable * 1.01)) < 1.0) stable *= 1.01;
  double diverges = stable * 1.01;
  for (int i = 0; i < 40; ++i) {
    const double middle = (stable + diverges) / 2;
    (spectral_radius(polynomial(middle)) < 1.0 ? stable : diverges) = middle;
  }
  return stable;
}

// The limits are those of docs/strategies.md. Near them runs grow or shrink slowly, so that these keep away.
TEST(DelayedUpdateTest, IsStableUpToTheLearningRateOfTheRecurrence) {
  const auto expect_limit = [](const StrategyChoice& choice, double m, double found, double known) {
    EXPECT_NEAR(found, known, 2e-3 * known);
    const auto& [num_steps, distance] = m == 0.99 ? std::pair(4000, 0.3) : std::pair(1000, 0.1);
    EXPECT_LT(where_it_ends((1 - distance) * found, choice, m, num_steps), 0.2);
    EXPECT_FALSE(where_it_ends((1 + distance) * found, choice, m, num_steps) < 5.0);  // NaN counts
  };
  for (const double m : {0.0, 0.9, 0.99}) {
    expect_limit("single_device", m, largest_stable([&](double a) { return on_time(a, m); }), 2 * (1 + m));
  }
  for (const auto& [predict, m, c, b, known] :
       {std::tuple("none", 0.0, 0.0, 0.0, 1.0), std::tuple("gradient", 0.0, 0.0, 0.0, 1.0),  // which is none
        std::tuple("moments", 0.0, 0.0, 0.0, 1.0), std::tuple("repeat", 0.0, 0.0, 0.0, 1.0),
        std::tuple("none", 0.9, 0.0, 0.0, 0.100), std::tuple("gradient", 0.9, 0.9, 1.0, 0.5004),
        std::tuple("moments", 0.9, 0.9, 0.0, 0.2531), std::tuple("repeat", 0.9, 1.0, 0.0, 0.2702),
        std::tuple("none", 0.99, 0.0, 0.0, 0.0100), std::tuple("gradient", 0.99, 0.99, 1.0, 0.5000),
        std::tuple("moments", 0.99, 0.99, 0.0, 0.0914), std::tuple("repeat", 0.99, 1.0, 0.0, 0.0950)}) {
    SCOPED_TRACE(fmt::format("{}, momentum {}", predict, m));
    expect_limit(DelayedUpdate{.base = "single_device", .predict = predict, .warmup_steps = 0}, m,
                 largest_stable([&, m = m, c = c, b = b](double a) { return late(a, m, c, b); }), known);
  }
}

TEST(DelayedUpdateTest, TheWarmUpCountsTheStepsOfStrategiesThatARunResumesFrom) {
  for (const char* name : {"single_device", "zero_offload"}) {
    const auto module = make_module<Quadratic>(/*its_lr=*/0.1, /*its_momentum=*/0.0);
    World alone;
    const auto strategy = StrategyChoice(name).make("auto");
    strategy->setup(*module, {.devices = {c10::kCPU}, .world = alone});
    strategy->setup_optimizers(module->configure_optimizers());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = strategy->training_step({}, step);
      strategy->zero_grad(0);
      strategy->backward(loss, /*is_last=*/true);
      strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
      strategy->optimizer_step(0, {});
    }
    EXPECT_EQ(strategy->state().shared.get<int64_t>("num_steps"), 3) << name;
    strategy->teardown();
  }
}

// SGD with momentum whose updates are slow, or fail.
class Odd final : public optim::ElementWiseOptimizer {
 public:
  Odd(std::vector<at::Tensor> params, std::chrono::milliseconds delay, int64_t fails_at)
      : ElementWiseOptimizer("Odd", {{.params = std::move(params)}}, kLr, 0, {{.name = "momentum_buffer"}}),
        delay_(delay),
        fails_at_(fails_at) {}
  optim::Rule rule(const Group& group, int64_t num_updates) const override {
    std::this_thread::sleep_for(delay_);
    if (num_updates == fails_at_) throw std::runtime_error("the update failed");
    return optim::SGDRule{.lr = group.lr, .momentum = 0.9};
  }

 protected:
  void update_with_torch(const Group&, int64_t, const TensorLists&, const std::optional<at::Tensor>&) override {}

 private:
  std::chrono::milliseconds delay_;
  int64_t fails_at_;
};

template <int64_t kDelay, int64_t kFailsAt = -1>
struct WithOdd : Recorded<ByMomentum> {
  Optimizers configure_optimizers() override { return Odd(parameters(), std::chrono::milliseconds(kDelay), kFailsAt); }
};

const DelayedUpdate kFromStep0{.warmup_steps = 0};

TEST(DelayedUpdateTest, ASlowWorkerChangesTheTimeOnly) {
  run_ranks(1, [](World& world) {
    EXPECT_TRUE(train<WithOdd<5>>(world, {}, kFromStep0).equal(train<WithOdd<0>>(world, {}, kFromStep0)));
  });
}

TEST(DelayedUpdateTest, AnUpdateThatFailsEndsTheRun) {
  for (const int64_t world_size : {1, 2}) {
    EXPECT_THROW(run_ranks(world_size,
                           [](World& world) {
                             EXPECT_THAT(
                                 message_of<std::exception>([&] { train<WithOdd<0, 5>>(world, {}, kFromStep0); }),
                                 HasSubstr("the update failed"));
                             throw std::runtime_error("over");
                           }),
                 std::runtime_error);
  }
}

// Only the update of rank 1 fails.
struct WithOddOnRank1 : WithOdd<0> {
  static thread_local int64_t rank_of_thread;
  Optimizers configure_optimizers() override {
    return Odd(parameters(), std::chrono::milliseconds(0), rank_of_thread == 1 ? 5 : -1);
  }
};
thread_local int64_t WithOddOnRank1::rank_of_thread = 0;

TEST(DelayedUpdateTest, AnUpdateThatFailsOnOneRankEndsAllAtTheNextBoundary) {
  for (const std::string base : {"ddp_sharded", "zero_offload"}) {
    std::vector<std::string> errors(2);
    EXPECT_THROW(run_ranks(2,
                           [&](World& world) {
                             WithOddOnRank1::rank_of_thread = world.rank();
                             errors[static_cast<size_t>(world.rank())] = message_of<std::exception>([&] {
                               train<WithOddOnRank1>(world, {}, DelayedUpdate{.base = base, .warmup_steps = 0});
                             });
                             throw std::runtime_error("over");
                           }),
                 std::runtime_error);
    EXPECT_THAT(errors[0], HasSubstr("rank 1")) << base;
    EXPECT_THAT(errors[1], HasSubstr("the update failed")) << base;
  }
}

TEST(DelayedUpdateTest, TheLastValidationSeesTheWeightsThatFitEndsWith) {
  for (const int64_t max_steps : {-1, 9}) {  // the second run ends in the middle of an epoch
    const auto module = make_module<Recorded<ByMomentum>>();
    Trainer trainer(testing::quiet({.strategy = DelayedUpdate{.base = "single_device", .warmup_steps = 0},
                                    .max_epochs = 2,
                                    .max_steps = max_steps,
                                    .num_sanity_val_steps = 0}));
    trainer.fit(module, {.train = testing::tiny_loader(48, 8), .val = testing::tiny_loader(8, 8)});
    ASSERT_EQ(module->at_validations.size(), 2U);
    const at::Tensor expected = testing::flat_weights(*module);
    EXPECT_TRUE(module->at_validations[1].equal(expected)) << max_steps;
    EXPECT_TRUE(module->at_epoch_ends[1].equal(expected)) << max_steps;
  }
}

// A validation after every second batch, and with_evaluated_weights() after each one, also within an accumulation
// window, see the weights with the update in progress, and training goes on as if nobody had looked.
template <class O>
void expect_evaluated_of_recurrence(const Plan& plan) {
  SCOPED_TRACE(fmt::format("{}, accumulate {}, {} ranks{}", plan.base, plan.accumulate, plan.world_size,
                           plan.bf16 ? ", bf16" : ""));
  const Trained<O> got = trained<O>(plan);
  const Recurrence expected = recurrence<O>(got.batches, plan);
  EXPECT_TRUE(are_equal(got.params, expected.params));
  for (const auto& module : got.modules) {
    const size_t num_batches = module->batches.size(), accumulate = static_cast<size_t>(plan.accumulate);
    ASSERT_EQ(module->evaluated_at_batch_ends.size(), num_batches);
    ASSERT_EQ(module->at_validations.size(), num_batches / 2);
    size_t differ = 0;
    for (size_t i = 0; i < num_batches; ++i) {
      const at::Tensor& after = expected.evaluated.at((i + 1) / accumulate);
      EXPECT_TRUE(module->evaluated_at_batch_ends[i].equal(after)) << i;
      if (i % 2 == 1) {
        EXPECT_TRUE(module->at_validations[i / 2].equal(after)) << i;
      }
      differ += module->at_batch_ends[i].equal(after) ? 0 : 1;
    }
    EXPECT_GT(differ, num_batches / 2);  // what forward reads
  }
}

TEST(DelayedUpdateTest, ValidationsAndHooksThatRequestItSeeTheWeightsOfTheRecurrenceWithAllUpdates) {
  for (const std::string& base : kBases) {
    for (const int64_t world_size : {1, 2}) {
      if (base == "single_device" && world_size > 1) continue;
      for (const bool bf16 : {false, true}) {
        const Plan plan{.base = base, .world_size = world_size, .bf16 = bf16, .lr = 0.1, .validates_every = 2};
        expect_evaluated_of_recurrence<ByAdamW>(plan);
        expect_evaluated_of_recurrence<ByMomentum>(plan);
      }
      if (base == "ddp" && world_size > 1) continue;  // sums over micro-batches first
      expect_evaluated_of_recurrence<ByAdamW>(
          {.base = base, .accumulate = 2, .world_size = world_size, .validates_every = 2});
    }
  }
}

// A parameter takes part in the first three steps only, whose last update is computed during step 3, from 0.
struct PartOfTheTime : TinyModule {
  at::Tensor part = register_parameter("part", torch::ones({100}));
  std::vector<at::Tensor> seen{};
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    seen.push_back(part.detach().clone());
    const at::Tensor loss = TinyModule::training_step(batch, batch_idx);
    return batch_idx < 3 ? loss + part.to(at::kFloat).square().sum() : loss;
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = kLr}); }
};

TEST(DelayedUpdateTest, AParameterThatIsNotUpdatedIsNotAhead) {
  for (const std::string& base : kBases) {
    for (const char* precision : {"32", "bf16-true"}) {
      for (const double bucket_cap_mib : {25.0, 1e-4}) {  // with others in a bucket, and alone
        SCOPED_TRACE(fmt::format("{}, {}, buckets of {} MiB", base, precision, bucket_cap_mib));
        const auto module = make_module<PartOfTheTime>();
        const RankOptions ranks{.bucket_cap_mib = bucket_cap_mib, .first_bucket_mib = bucket_cap_mib};
        TrainerOptions options = testing::quiet({.precision = precision});
        options.strategy = DelayedUpdate{.base = base, .warmup_steps = 0, .ranks = ranks};
        Trainer(options).fit(module, {.train = testing::tiny_loader(7 * 8, 8)});
        EXPECT_EQ(module->seen.at(3).equal(module->seen[4]),
                  precision == std::string_view("bf16-true"));  // by rounding
        for (const size_t step : {4, 5, 6})
          EXPECT_TRUE(module->seen.at(step).to(at::kFloat).equal(module->part)) << step;
      }
    }
  }
}

// After five steps the run ends by an exception, or by a signal.
struct EndsEarly : TinyModule {
  bool throws = false, is_interrupted = false;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (throws && batch_idx == 5) throw std::runtime_error("over");
    if (is_interrupted && batch_idx == 4) std::raise(SIGTERM);
    return TinyModule::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = kLr}); }
};

TEST(DelayedUpdateTest, ARunThatEndsEarlyLeavesTheModuleWithAllUpdates) {
  for (const std::string& base : kBases) {
    for (const char* precision : {"32", "bf16-true"}) {
      SCOPED_TRACE(fmt::format("{}, {}", base, precision));
      const auto weights_after = [&](const std::function<void(EndsEarly&)>& change, int64_t max_steps) {
        const auto module = make_module<EndsEarly>();
        Recorded<ByMomentum>::seed(*module);
        change(*module);
        TrainerOptions options = testing::quiet({.max_steps = max_steps, .precision = precision});
        options.strategy = DelayedUpdate{.base = base, .warmup_steps = 0};
        const auto fit = [&] { Trainer(options).fit(module, {.train = testing::tiny_loader(80, 8)}); };
        if (max_steps == 5) {
          fit();
        } else {
          EXPECT_THROW(fit(), std::runtime_error);
        }
        return testing::flat_weights(*module);
      };
      const at::Tensor expected = weights_after([](EndsEarly&) {}, 5);
      EXPECT_TRUE(weights_after([](EndsEarly& m) { m.throws = true; }, 10).equal(expected));
      EXPECT_TRUE(weights_after([](EndsEarly& m) { m.is_interrupted = true; }, 10).equal(expected));
    }
  }
}

TEST(DelayedUpdateTest, ARunOfSeveralRanksThatFailsWarnsOfWeightsThatLackAnUpdate) {
  for (const std::string base : {"ddp", "ddp_sharded"}) {
    ::testing::internal::CaptureStderr();
    EXPECT_THROW(run_ranks(2,
                           [&](World&) {
                             const auto module = make_module<EndsEarly>();
                             module->throws = true;
                             TrainerOptions options = testing::quiet({.devices = 2});
                             options.strategy = DelayedUpdate{.base = base, .warmup_steps = 0};
                             Trainer(options).fit(module, {.train = testing::tiny_loader(160, 8)});
                           }),
                 std::runtime_error);
    const auto warning = HasSubstr("which lack that update");
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                base == "ddp" ? ::testing::Matcher<std::string>(Not(warning)) : warning);
  }
}

// A learning rate that a hook sets for the first step, and that stays.
struct SetsItsRate : TinyModule {
  double lr, set;
  SetsItsRate(double at_first, double by_hook) : lr(at_first), set(by_hook) {}
  void on_before_optimizer_step(Optimizer& optimizer) override { optimizer.groups()[0].lr = set; }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = lr}); }
};

TEST(DelayedUpdateTest, ExpectsAnUpdateByTheLearningRateThatAHookSets) {
  const auto weights = [](double at_first) {
    const auto module = make_module<SetsItsRate>(at_first, kLr);
    Recorded<ByMomentum>::seed(*module);
    Trainer(testing::quiet({.strategy = DelayedUpdate{.base = "single_device", .warmup_steps = 0}}))
        .fit(module, {.train = testing::tiny_loader(40, 8)});
    return testing::flat_weights(*module);
  };
  EXPECT_TRUE(weights(1.0).equal(weights(kLr)));
}

// A strategy with an update in progress, to be asked by the test.
struct WithLateUpdate {
  std::shared_ptr<Quadratic> module = make_module<Quadratic>(/*its_lr=*/0.1, /*its_momentum=*/0.9);
  World alone{};
  std::unique_ptr<Strategy> strategy =
      StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0}).make("auto");
  WithLateUpdate() {
    strategy->setup(*module, {.devices = {c10::kCPU}, .world = alone, .averages_weights = true});
    strategy->setup_optimizers(module->configure_optimizers());
    step();
    step();
  }
  ~WithLateUpdate() { strategy->teardown(); }
  void step() const {
    const at::Tensor loss = strategy->training_step({}, 0);
    strategy->zero_grad(0);
    strategy->backward(loss, /*is_last=*/true);
    strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
    strategy->optimizer_step(0, {});
  }
  double x() const { return module->x.item<double>(); }
  double evaluated() const {
    strategy->show_evaluated(true);
    const double shown = x();
    strategy->show_evaluated(false);
    return shown;
  }
};

TEST(DelayedUpdateTest, EveryCallAveragesTheWeights) {
  WithLateUpdate plain;
  const double before = plain.evaluated();
  plain.step();
  const double after = plain.evaluated();
  WithLateUpdate averaged;
  averaged.strategy->average_weights(1.0);
  averaged.step();
  averaged.strategy->average_weights(0.5);
  averaged.strategy->average_weights(0.5);
  EXPECT_NE(before, after);
  EXPECT_NEAR(averaged.evaluated(), before / 4 + after * 3 / 4, 1e-6);
}

TEST(DelayedUpdateTest, CompletesAnUpdateWhileOtherWeightsAreShown) {
  WithLateUpdate plain, averaged;
  averaged.strategy->average_weights(1.0);
  plain.step();
  averaged.step();
  const double ahead = plain.x();
  plain.strategy->drain();
  averaged.strategy->show_evaluated(true);
  const double average = averaged.x();
  averaged.strategy->drain();
  EXPECT_EQ(averaged.x(), average);
  averaged.strategy->show_evaluated(false);
  EXPECT_EQ(averaged.x(), plain.x());
  EXPECT_NE(plain.x(), ahead);
  EXPECT_NE(plain.x(), average);
}

// A hook may throw while it sees them: then the module keeps them.
TEST(DelayedUpdateTest, AfterAnExceptionTheModuleKeepsTheWeightsThatTheHookSaw) {
  struct ThrowsAtBatch : Recorded<ByMomentum> {
    at::Tensor seen{};
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
      if (batch_idx < 3) return;
      with_evaluated_weights([&] {
        seen = testing::flat_weights(*this);
        throw std::runtime_error("over");
      });
    }
  };
  const auto module = make_module<ThrowsAtBatch>();
  Trainer trainer(testing::quiet({.strategy = DelayedUpdate{.base = "single_device", .warmup_steps = 0}}));
  EXPECT_THROW(trainer.fit(module, {.train = testing::tiny_loader(40, 8)}), std::runtime_error);
  EXPECT_TRUE(testing::flat_weights(*module).equal(module->seen));
}

TEST(DelayedUpdateTest, WithoutMomentumNothingIsExpectedAndThatIsSaidOnce) {
  const auto output_of = [](const auto& module, std::string predict) {
    ::testing::internal::CaptureStderr();
    Trainer(testing::quiet({.strategy = DelayedUpdate{.base = "single_device", .predict = std::move(predict)}}))
        .fit(module, {.train = testing::tiny_loader(40, 8)});
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string said = output_of(make_module<Recorded<BySGD>>(), "gradient");
  const std::string reason = "unpredicted, because SGD has no momentum";
  ASSERT_THAT(said, HasSubstr(reason));
  EXPECT_EQ(said.find(reason), said.rfind(reason));
  EXPECT_THAT(output_of(make_module<Recorded<BySGD>>(), "none"), Not(HasSubstr("no momentum")));
  EXPECT_THAT(output_of(make_module<Recorded<ByMomentum>>(), "gradient"), HasSubstr("forward is ahead"));
}

template <class M = TinyModule>
std::string why_refused(const StrategyChoice& choice, int64_t devices = 1) {
  return message_of<UsageError>([&] {
    TrainerOptions options = testing::quiet({.strategy = choice});
    options.devices = devices;
    Trainer(options).fit(make_module<M>(), {.train = testing::tiny_loader()});
  });
}

TEST(DelayedUpdateTest, BadInputIsRefused) {
  EXPECT_THAT(why_refused(DelayedUpdate{.warmup_steps = -1}), HasSubstr("warmup_steps"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "dp"}),
              HasSubstr("does not go over 'dp': its replicas read the weights"));
  EXPECT_THAT(why_refused(DelayedUpdate{.predict = "gradients"}), HasSubstr("did you mean 'gradient'"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "zero_ofload"}), HasSubstr("did you mean 'zero_offload'"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device"}, 2), HasSubstr("strategy.base = 'ddp'"));
}

TEST(DelayedUpdateTest, SettingsThatItsBaseDoesNotHaveAreRefused) {
  EXPECT_THAT(
      why_refused(DelayedUpdate{.base = "ddp", .host = {.ratio = 0.5}}),
      HasSubstr("strategy 'delayed_update': ratio = 0.5 would have no effect with base = 'ddp'; leave it at 1"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "ddp_sharded", .host = {.ratio = 0.5}}), HasSubstr("ratio = 0.5"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "ddp", .reduce = "at_boundary"}), HasSubstr("reduce = at_boundary"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device", .ranks = {.timeout_s = 5}}),
              HasSubstr("timeout_s = 5"));
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device", .ranks = {.broadcast_buffers = false}}),
              HasSubstr("broadcast_buffers = false"));
}

TEST(DelayedUpdateTest, OptimizersWithClosuresAreRefused) {
  struct WithLbfgs : TinyModule {
    Optimizers configure_optimizers() override { return optim::TorchOptimizer(torch::optim::LBFGS(parameters())); }
  };
  for (const std::string& base : kBases) {
    run_ranks(1, [&](World&) {
      EXPECT_THAT(why_refused<WithLbfgs>(DelayedUpdate{.base = base}), HasSubstr("whole tensors and the loss")) << base;
    });
  }
}

TEST(DelayedUpdateTest, ManualOptimisationIsRefused) {
  struct Manual : TinyModule {
    Manual() { automatic_optimization = false; }
  };
  EXPECT_THAT(message_of<SetupError>([] {
                Trainer(testing::quiet({.strategy = "delayed_update"}))
                    .fit(make_module<Manual>(), {.train = testing::tiny_loader()});
              }),
              HasSubstr("keeps the gradients of a step apart"));
}

}  // namespace
}  // namespace fulgur
