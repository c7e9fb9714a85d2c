// Updates delayed by one step, compared with the recurrence written out.
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
#include <type_traits>

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
#include "tests/testing/at_batch_end.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"

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
  std::string precision = "32";  // 16-mixed where it is 32 and steps overflow
  std::string predict = "gradient";
  std::set<size_t> overflows_at{};  // micro-batches, counted over all ranks
  double lr = kLr, gamma = kGamma;  // the learning rate at first, and its factor every kEvery steps
  int64_t validates_every = 0;      // batches; 0: no validation
  bool has_two_groups = false;      // layer `out` has a learning rate and a weight decay of its own
  int64_t frequency = 1;            // steps between steps of the schedule
  std::string reduce = "each_micro_batch";
  std::set<int64_t> refuses_at{};         // updates that a callback refuses, counted from 0
  std::pair<size_t, size_t> is_frozen{};  // layer `out` is frozen from the first to before the second of these batches
  bool adds_group = false;                // layer `out` is in no group of the optimizer until it is not frozen

  std::string used_precision() const { return precision == "32" && !overflows_at.empty() ? "16-mixed" : precision; }
  at::ScalarType dtype() const {
    if (precision == "bf16-true") return at::kBFloat16;
    if (precision == "16-true") return at::kHalf;
    return precision == "64" ? at::kDouble : at::kFloat;
  }
  std::string described() const {
    return fmt::format(
        "{}, predicted by {}, accumulate {}, clip {}, warm-up {}, {} ranks, ratio {}, precision {}, frequency {}, {}, "
        "frozen from {} to {}{}{}{}{}",
        base, predict, accumulate, clip, warmup, world_size, ratio, used_precision(), frequency, reduce,
        is_frozen.first, is_frozen.second, has_two_groups ? ", two groups" : "", adds_group ? ", adds a group" : "",
        overflows_at.empty() ? "" : ", overflows", refuses_at.empty() ? "" : ", refuses");
  }
};

constexpr double kLrOfOut = 0.3;  // over the learning rate of the other group
constexpr double kDecayOfOut = 0.7;

constexpr double kOverflow = 1e37;  // times the loss scale it exceeds fp32

// The optimizers of the tests. rule() writes out the coefficients of the t-th update from the same options
// (optim/update_rules.h has the formulas), kDecay is its weight decay, kSlots are the states that it uses, and
// kIsPredicted says whether it has the momentum that a prediction needs.
struct ByAdamW {
  static optim::AdamW make(std::vector<ParamGroup> groups, double lr) {
    return optim::AdamW(std::move(groups), {.lr = lr, .betas = {0.8, 0.95}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t, double decay) {
    const auto n = static_cast<double>(t);
    return optim::AdamRule{.one_minus_beta1 = 1.0 - 0.8,
                           .one_minus_beta2 = 1.0 - 0.95,
                           .step_size = lr / (1.0 - std::pow(0.8, n)),
                           .inv_root_bias_correction2 = 1.0 / std::sqrt(1.0 - std::pow(0.95, n)),
                           .decay = lr * decay};
  }
  static constexpr double kDecay = 0.1;
  static constexpr size_t kSlots[] = {0, 1};
  static constexpr bool kIsPredicted = true;
};
struct ByAdam {
  static optim::Adam make(std::vector<ParamGroup> groups, double lr) {
    return optim::Adam(std::move(groups), {.lr = lr, .betas = {0.8, 0.95}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t, double decay) {
    optim::Rule rule = ByAdamW::rule(lr, t, decay);
    std::get<optim::AdamRule>(rule).decay = 0.0;
    std::get<optim::AdamRule>(rule).l2 = decay;
    return rule;
  }
  static constexpr double kDecay = 0.1;
  static constexpr size_t kSlots[] = {0, 1};
  static constexpr bool kIsPredicted = true;
};
struct ByLion {
  static optim::Lion make(std::vector<ParamGroup> groups, double lr) {
    return optim::Lion(std::move(groups), {.lr = lr, .betas = {0.9, 0.8}, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t, double decay) {
    return optim::LionRule{.lr = lr, .one_minus_beta1 = 1.0 - 0.9, .one_minus_beta2 = 1.0 - 0.8, .decay = lr * decay};
  }
  static constexpr double kDecay = 0.1;
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByMomentum {
  static optim::SGD make(std::vector<ParamGroup> groups, double lr) {
    return optim::SGD(std::move(groups), {.lr = lr, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t, double decay) {
    return optim::SGDRule{.lr = lr, .momentum = 0.9, .one_minus_dampening = t == 1 ? 1.0 : 1.0 - 0.2, .l2 = decay};
  }
  static constexpr double kDecay = 0.1;
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByNesterov {
  static optim::SGD make(std::vector<ParamGroup> groups, double lr) {
    return optim::SGD(std::move(groups), {.lr = lr, .momentum = 0.9, .nesterov = true});
  }
  static optim::Rule rule(double lr, int64_t, double decay) {
    return optim::SGDRule{.lr = lr, .momentum = 0.9, .l2 = decay, .nesterov = true};
  }
  static constexpr double kDecay = 0.0;
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = true;
};
struct ByRMSpropWithMomentum {
  static optim::RMSprop make(std::vector<ParamGroup> groups, double lr) {
    return optim::RMSprop(std::move(groups), {.lr = lr, .alpha = 0.9, .momentum = 0.5, .centered = true});
  }
  static optim::Rule rule(double lr, int64_t, double decay) {
    return optim::RMSpropRule{.lr = lr, .one_minus_alpha = 1.0 - 0.9, .momentum = 0.5, .l2 = decay};
  }
  static constexpr double kDecay = 0.0;
  static constexpr size_t kSlots[] = {0, 1, 2};
  static constexpr bool kIsPredicted = true;
};
struct ByRMSprop {
  static optim::RMSprop make(std::vector<ParamGroup> groups, double lr) {
    return optim::RMSprop(std::move(groups), {.lr = lr, .alpha = 0.9});
  }
  static optim::Rule rule(double lr, int64_t, double decay) {
    return optim::RMSpropRule{.lr = lr, .one_minus_alpha = 1.0 - 0.9, .l2 = decay};
  }
  static constexpr double kDecay = 0.0;
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = false;
};
struct ByAdagrad {
  static optim::Adagrad make(std::vector<ParamGroup> groups, double lr) {
    return optim::Adagrad(std::move(groups), {.lr = lr, .lr_decay = 0.1, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t t, double decay) {
    return optim::AdagradRule{.lr = lr / (1.0 + static_cast<double>(t - 1) * 0.1), .l2 = decay};
  }
  static constexpr double kDecay = 0.1;
  static constexpr size_t kSlots[] = {0};
  static constexpr bool kIsPredicted = false;
};
struct BySGD {
  static optim::SGD make(std::vector<ParamGroup> groups, double lr) {
    return optim::SGD(std::move(groups), {.lr = lr, .weight_decay = 0.1});
  }
  static optim::Rule rule(double lr, int64_t, double decay) { return optim::SGDRule{.lr = lr, .l2 = decay}; }
  static constexpr double kDecay = 0.1;
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
  static void freeze(const TinyModule& net, const Plan& plan, size_t batch) {
    const bool is_frozen = plan.is_frozen.first <= batch && batch < plan.is_frozen.second;
    for (at::Tensor& parameter : net.out->parameters()) parameter.set_requires_grad(!is_frozen);
  }
  ParamGroup group_of_out() const {
    return {.params = out->parameters(), .lr = plan.lr * kLrOfOut, .weight_decay = kDecayOfOut};
  }
  Optimizers configure_optimizers() override {
    const bool is_whole = !plan.has_two_groups && !plan.adds_group;
    std::vector<ParamGroup> groups{{.params = is_whole ? parameters() : hidden->parameters()}};
    if (plan.has_two_groups) groups.push_back(group_of_out());
    return {O::make(std::move(groups), plan.lr),
            {.scheduler = optim::StepLR::make({.step_size = kEvery, .gamma = plan.gamma}),
             .interval = "step",
             .frequency = plan.frequency}};
  }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
    freeze(*this, plan, batches.size());
    if (plan.adds_group && batches.size() == plan.is_frozen.second) optimizers()[0].add_param_group(group_of_out());
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
  std::vector<at::Tensor> sums{};  // by parameter; undefined: not updated
  optim::GradientScaling scaling{};
  std::array<double, 2> lr{};  // by group
};

// Adds gradients to sums, in the dtype in which micro-batches are summed.
void add_to(std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& gradients, at::ScalarType dtype) {
  sums.resize(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    sums[i] = sums[i].defined() ? sums[i] + gradients[i].to(dtype)
                                : gradients[i].to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
}

// Parameters and states as plain tensors, which are updated by the rule of O.
template <class O>
struct Plain {
  using States = std::array<at::Tensor, optim::kMaxStates>;
  std::vector<at::Tensor> params{};  // fp32 or fp64
  std::vector<States> states{};
  std::vector<int64_t> num_updates{};
  bool has_two_groups;

  Plain(const std::vector<at::Tensor>& values, bool in_two_groups)
      : num_updates(values.size()), has_two_groups(in_two_groups) {
    for (const at::Tensor& value : values) {
      params.push_back(value.detach().to(optim::widened(value.scalar_type()), /*non_blocking=*/false, /*copy=*/true));
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

  size_t group_of(size_t i) const { return has_two_groups && i >= 2 ? 1 : 0; }  // weight and bias of `out` come last

  void update(const Gradients& by) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (!by.sums[i].defined()) continue;
      const size_t group = group_of(i);
      const optim::Rule rule = O::rule(by.lr[group], ++num_updates[i], group == 0 ? O::kDecay : kDecayOfOut);
      fused(rule, params[i], states[i], by.sums[i], by.scaling);
    }
  }

  // The parameters plus the update that is expected after that by `last`, before which they were `before`. What `next`,
  // the update that does follow, leaves alone is not ahead.
  Plain ahead(const std::string& predict, const Gradients& last, const Gradients& next, const Plain& before) const {
    Plain result = clone();
    if (!O::kIsPredicted || predict == "none") return result;
    Gradients expected = last;
    expected.lr = next.lr;
    for (size_t i = 0; i < params.size(); ++i) {
      at::Tensor& sum = expected.sums[i];
      if (!next.sums[i].defined()) sum.reset();
      if (!sum.defined()) continue;
      if (predict == "moments") sum = torch::zeros_like(sum);
      if (predict != "repeat") continue;
      const optim::SGDRule again{.lr = -std::min(next.lr[group_of(i)] / last.lr[group_of(i)], 2.0)};
      fused(again, result.params[i], {}, params[i] - before.params[i], {});
    }
    if (predict != "repeat") result.update(expected);
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
    param.scalar_type() == at::kDouble ? fused_of<double>(rule, param, states, gradient, scaling)
                                       : fused_of<float>(rule, param, states, gradient, scaling);
  }
  template <class T>
  static void fused_of(const optim::Rule& rule, const at::Tensor& param, const States& states,
                       const at::Tensor& gradient, const optim::GradientScaling& scaling) {
    optim::Slice<T> slice{.param = param.mutable_data_ptr<T>(),
                          .grad = gradient.const_data_ptr(),
                          .grad_type = gradient.scalar_type(),
                          .num_elements = param.numel()};
    for (size_t k = 0; k < states.size(); ++k) {
      if (states[k].defined()) slice.states[k] = states[k].mutable_data_ptr<T>();
    }
    optim::fused_update(rule, slice, scaling);
  }
};

// theta_{i+1} uses g_{i-1}, with the settings of step i-1; the first updates are synchronous. A step whose gradients
// overflow, or whose update is refused, has no update and is not counted. Forward sees theta_{i+1} and, if another
// update follows that theta_{i+1} lacks, the one that is expected by its learning rate. Each of two epochs ends with
// all its updates.
template <class O>
Recurrence recurrence(const std::vector<Batch>& batches, const Plan& plan,
                      OnOverflow on_overflow = OnOverflow::is_applied) {
  TinyModule net;  // has the parameters that training_step sees
  Recorded<O>::seed(net);
  net.to(plan.dtype());
  Recurrence result;
  Plain<O> exact(net.parameters(), plan.has_two_groups || plan.adds_group);
  const auto apply = [&](const Gradients& late, const Gradients* next = nullptr) {
    const Plain<O> before = exact.clone();
    exact.update(late);
    (next ? exact.ahead(plan.predict, late, *next, before) : exact).write_to(net.parameters());
  };
  const std::string precision = plan.used_precision();
  const bool is_fp16 = precision.starts_with("16");
  const bool sums_micro_batches_first = plan.world_size > 1 && (plan.base == "ddp" || plan.reduce == "at_boundary");
  std::array<double, 2> lr{plan.lr, plan.lr * kLrOfOut};
  double loss_scale = is_fp16 ? 65536.0 : 1.0;
  const auto backward = [&](size_t m) {
    at::Tensor loss;
    {
      std::optional<ScopedAutocast> autocast;
      if (precision.ends_with("mixed"))
        autocast.emplace(AutocastState{at::kCPU, true, is_fp16 ? at::kHalf : at::kBFloat16});
      loss = net.loss(batches[m]);
    }
    if (plan.overflows_at.contains(m)) loss = loss * kOverflow;
    (is_fp16 ? loss.to(at::kFloat) * loss_scale : loss).backward();
  };
  std::optional<Gradients> pending;
  const auto add_evaluated = [&] {
    Plain<O> evaluated = exact.clone();
    if (pending) evaluated.update(*pending);
    TinyModule of_dtype;
    of_dtype.to(plan.dtype());
    evaluated.write_to(of_dtype.parameters());
    result.evaluated.push_back(testing::flat_weights(of_dtype));
  };
  const at::ScalarType sum_dtype = plan.accumulate > 1 ? optim::widened(plan.dtype()) : plan.dtype();
  bool finite = true;
  const auto take = [&](std::vector<at::Tensor>& sums) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& param : net.parameters()) {
      gradients.push_back(param.grad());
      finite = finite && (!param.grad().defined() || param.grad().isfinite().all().template item<bool>());
    }
    add_to(sums, gradients, sum_dtype);
    net.zero_grad();
  };
  const auto ranks = static_cast<size_t>(plan.world_size), micro_batches = static_cast<size_t>(plan.accumulate);
  const auto sums_of_window = [&](size_t begin) {
    std::vector<at::Tensor> sums;
    if (!sums_micro_batches_first) {
      for (size_t k = 0; k < micro_batches; ++k) {
        for (size_t r = 0; r < ranks; ++r) backward(begin + k * ranks + r);
        take(sums);
      }
      return sums;
    }
    for (size_t r = 0; r < ranks; ++r) {
      std::vector<at::Tensor> of_rank;
      for (size_t k = 0; k < micro_batches; ++k) {
        backward(begin + k * ranks + r);
        take(of_rank);
      }
      add_to(sums, of_rank, sum_dtype);
    }
    return sums;
  };
  const size_t window = ranks * micro_batches;
  int64_t num_judged = 0;  // updates that a callback accepts or refuses
  for (size_t begin = 0; begin < batches.size(); begin += window) {
    if (pending && begin == batches.size() / 2) apply(*std::exchange(pending, std::nullopt));
    add_evaluated();
    Recorded<O>::freeze(net, plan, begin / ranks);
    finite = true;
    Gradients now{.sums = sums_of_window(begin), .lr = lr};
    if (!finite) loss_scale *= 0.5;
    if (!finite || plan.refuses_at.contains(num_judged++)) {
      if (!pending) continue;
      ++result.skipped_beside_an_update;
      if (on_overflow == OnOverflow::is_applied) apply(*pending);
      if (on_overflow != OnOverflow::stays_under_way) pending.reset();
      continue;
    }
    const double mean = 1.0 / loss_scale / static_cast<double>(window);
    now.scaling.factor = mean;
    if (plan.clip > 0) {
      std::vector<at::Tensor> defined;
      for (const at::Tensor& sum : now.sums) {
        if (sum.defined()) defined.push_back(sum);
      }
      const at::Tensor norm = joint_norm(defined).mul(mean);
      now.scaling.factor = clip_coefficient(norm, plan.clip).mul(mean).template item<double>();
    }
    const bool is_late = result.global_step >= plan.warmup;
    if (pending) apply(*std::exchange(pending, std::nullopt), is_late ? &now : nullptr);
    is_late ? void(pending = now) : apply(now);
    if (++result.global_step % (kEvery * plan.frequency) == 0) {
      for (double& of_group : lr) of_group *= plan.gamma;
    }
  }
  if (pending) apply(*std::exchange(pending, std::nullopt));
  add_evaluated();
  result.params = net.parameters();
  return result;
}

// Refuses updates, by their number.
class Refuses final : public Callback {
 public:
  explicit Refuses(std::set<int64_t> numbers) : numbers_(std::move(numbers)) {}
  bool judges_updates() const override { return true; }
  bool accepts_update(TrainerControl&, double, double) override { return !numbers_.contains(next_++); }

 private:
  std::set<int64_t> numbers_;
  int64_t next_ = 0;
};

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
    Recorded<O>::freeze(*module, plan, /*batch=*/0);
    TrainerOptions options =
        testing::quiet({.strategy = DelayedUpdate{.base = plan.base,
                                                  .predict = plan.predict,
                                                  .warmup_steps = plan.warmup,
                                                  .host = {.ratio = plan.ratio, .update_threads = 2},
                                                  .reduce = plan.reduce},
                        .devices = plan.world_size,
                        .max_epochs = 2,
                        .num_sanity_val_steps = 0,
                        .precision = plan.used_precision(),
                        .accumulate_grad_batches = plan.accumulate,
                        .gradient_clip_val = plan.clip});
    if (!plan.refuses_at.empty()) options.callbacks.push_back(std::make_shared<Refuses>(plan.refuses_at));
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

// After fit a module has its own dtype again, whatever the precision.
bool are_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  return std::ranges::equal(got, expected, [](const at::Tensor& one, const at::Tensor& other) {
    return one.equal(other.to(one.scalar_type()));
  });
}

template <class O>
void expect_recurrence(const Plan& plan) {
  SCOPED_TRACE(plan.described());
  const Trained<O> got = trained<O>(plan);
  const Recurrence expected = recurrence<O>(got.batches, plan);
  EXPECT_EQ(got.global_step, expected.global_step);
  EXPECT_TRUE(are_equal(got.params, expected.params));
  EXPECT_TRUE(got.modules.front()->at_epoch_ends.back().equal(expected.evaluated.back()));  // not rounded to fp32
  if (got.global_step > plan.warmup + 1 && plan.predict != "none" && O::kIsPredicted &&
      !plan.precision.ends_with("16-true")) {  // 16 bits may round it
    Plan unpredicted = plan;
    unpredicted.predict = "none";
    EXPECT_FALSE(are_equal(got.params, recurrence<O>(got.batches, unpredicted).params));
  }
  if (plan.overflows_at.empty() && plan.refuses_at.empty()) return;
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

// Lion takes the sign of the gradient, which only larger steps change.
TEST(DelayedUpdateTest, IsTheRecurrenceBitForBitByEveryRule) {
  for (const std::string base : {"single_device", "zero_offload"}) {
    for (const char* predict : {"gradient", "moments", "repeat"}) {
      for (const Plan& plan : {Plan{.clip = 0.1},
                               {.clip = 0.1, .precision = "bf16-true"},
                               {.accumulate = 2, .clip = 0.1, .lr = 0.1},
                               {.accumulate = 2, .clip = 0.1, .overflows_at = {10, 14, 15}, .lr = 0.1}}) {
        Plan every = plan;
        every.base = base;
        every.predict = predict;
        expect_recurrences<ByAdam, ByLion, ByNesterov, ByRMSpropWithMomentum, ByRMSprop, ByAdagrad, BySGD>(every);
      }
    }
  }
}

// The fp32 masters of the optimizer are delayed; the bf16 parameters are the masters, rounded.
TEST(DelayedUpdateTest, WithParametersOf16BitsIsTheRecurrenceBitForBit) {
  for (const std::string& base : kBases) {
    for (const double clip : {0.0, 0.1}) {
      for (const int64_t warmup : {0, 4}) {
        for (const int64_t accumulate : {1, 2}) {
          expect_recurrences<ByAdamW, ByMomentum>(
              {.base = base, .accumulate = accumulate, .clip = clip, .warmup = warmup, .precision = "bf16-true"});
        }
      }
    }
  }
}

TEST(DelayedUpdateTest, InEveryPrecisionIsTheRecurrenceBitForBit) {
  for (const std::string& base : kBases) {
    for (const char* precision : {"64", "16-true", "16-mixed", "bf16-mixed"}) {
      for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
        const double clip = precision == std::string_view("64") ? 0.0 : 0.1;  // norms of fp64 are rounded by tensor
        expect_recurrences<ByAdamW, ByMomentum>(
            {.base = base, .clip = clip, .precision = precision, .predict = predict});
      }
    }
  }
}

TEST(DelayedUpdateTest, EachGroupHasItsOwnLearningRateAndWeightDecay) {
  for (const std::string& base : kBases) {
    for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
      expect_recurrences<ByAdamW, ByAdam, ByMomentum, ByLion>(
          {.base = base, .predict = predict, .has_two_groups = true});
    }
  }
}

TEST(DelayedUpdateTest, WithAScheduleThatMovesEverySecondStepIsTheRecurrenceBitForBit) {
  for (const char* predict : {"gradient", "moments", "repeat"}) {
    expect_recurrences<ByAdamW, ByMomentum>({.base = "single_device", .predict = predict, .frequency = 2});
  }
}

// Layer `out` is new to the buckets after 3 batches, or frozen for a time, while an update of the others is in
// progress.
TEST(DelayedUpdateTest, AParameterThatIsFrozenOrNewIsThatOfTheRecurrence) {
  for (const std::string& base : kBases) {
    for (const int64_t world_size : {1, 2}) {
      if (base == "single_device" && world_size > 1) continue;
      for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
        const auto expect = [&](const Plan& plan) {
          Plan frozen = plan;
          frozen.base = base;
          frozen.world_size = world_size;
          frozen.predict = predict;
          expect_recurrences<ByAdamW, ByMomentum>(frozen);
        };
        expect({.is_frozen = {0, 3}});
        expect({.is_frozen = {2, 4}});
        expect({.gamma = 1.0, .is_frozen = {0, 3}, .adds_group = true});
      }
    }
  }
}

TEST(DelayedUpdateTest, AnUpdateThatACallbackRefusesIsSkippedAloneOnEveryRank) {
  for (const std::string& base : kBases) {
    for (const int64_t world_size : {1, 2}) {
      if (base == "single_device" && world_size > 1) continue;
      for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
        for (const int64_t accumulate : {1, 2}) {
          expect_recurrences<ByAdamW, ByMomentum>({.base = base,
                                                   .accumulate = accumulate,
                                                   .clip = 0.1,
                                                   .world_size = world_size,
                                                   .predict = predict,
                                                   .refuses_at = {1, 7, 8}});
        }
      }
    }
  }
}

struct LeavesOutSteps : testing::TinyModule {
  int64_t num_updates = 0, num_compared = 0;
  at::Tensor evaluated{};

  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 0.1, .momentum = 0.9}); }
  void optimizer_step(Optimizer&, const std::function<void()>& step) override {
    if (++num_updates % 3 != 0) return step();
    with_evaluated_weights([&] { evaluated = testing::flat_weights(*this); });
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (evaluated.defined()) {
      EXPECT_TRUE(testing::flat_weights(*this).equal(evaluated)) << batch_idx;
      evaluated.reset();
      ++num_compared;
    }
    return TinyModule::training_step(batch, batch_idx);
  }
};

// As after a step that a callback or the loss scale leaves out, forward reads the weights with all updates.
TEST(DelayedUpdateTest, AStepThatTheModuleLeavesOutCompletesTheUpdateBefore) {
  for (const std::string& base : kBases) {
    const auto module = make_module<LeavesOutSteps>();
    const TrainerOptions options =
        testing::quiet({.strategy = DelayedUpdate{.base = base, .warmup_steps = 0}, .max_steps = 9});
    Trainer(options).fit(module, {.train = testing::tiny_loader(80)});
    EXPECT_GE(module->num_compared, 3) << base;
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
        for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
          expect_recurrences<ByAdamW, ByMomentum>({.base = base,
                                                   .accumulate = accumulate,
                                                   .clip = clip,
                                                   .warmup = 2,
                                                   .predict = predict,
                                                   .overflows_at = {10, 14, 15}});
        }
      }
    }
  }
}

TEST(DelayedUpdateTest, OnTwoRanksIsTheRecurrenceOfTheirSums) {
  for (const std::string base : {"ddp", "ddp_sharded", "zero_offload"}) {
    for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
      for (const double clip : {0.0, 0.1}) {
        for (const char* precision : {"32", "bf16-true"}) {
          expect_recurrences<ByAdamW, ByMomentum>(
              {.base = base, .clip = clip, .warmup = 2, .world_size = 2, .precision = precision, .predict = predict});
        }
        expect_recurrences<ByAdamW, ByMomentum>(
            {.base = base, .accumulate = 2, .clip = clip, .world_size = 2, .predict = predict});
      }
    }
    expect_recurrences<ByAdamW, ByMomentum>(
        {.base = base, .world_size = 2, .overflows_at = {15}});  // a micro-batch of rank 1
  }
}

TEST(DelayedUpdateTest, OnTwoRanksIsTheRecurrenceOfTheirSumsByEveryRuleWithMomentum) {
  for (const char* predict : {"gradient", "moments", "repeat"}) {
    for (const int64_t accumulate : {1, 2}) {
      expect_recurrences<ByAdam, ByLion, ByNesterov, ByRMSpropWithMomentum>({.base = "ddp_sharded",
                                                                             .accumulate = accumulate,
                                                                             .clip = 0.1,
                                                                             .warmup = 2,
                                                                             .world_size = 2,
                                                                             .predict = predict,
                                                                             .lr = 0.1});
    }
  }
}

TEST(DelayedUpdateTest, WithGradientsThatAreReducedAtTheBoundaryIsTheRecurrenceOfTheirSums) {
  for (const std::string base : {"ddp_sharded", "zero_offload"}) {
    for (const int64_t world_size : {1, 2}) {
      for (const char* predict : {"gradient", "moments", "repeat", "none"}) {
        expect_recurrences<ByAdamW, ByMomentum>({.base = base,
                                                 .accumulate = 2,
                                                 .clip = 0.1,
                                                 .world_size = world_size,
                                                 .predict = predict,
                                                 .reduce = "at_boundary"});
      }
    }
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
                 largest_stable([&](double a) { return late(a, m, c, b); }), known);
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
  SCOPED_TRACE(plan.described());
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
      for (const char* precision : {"32", "bf16-true"}) {
        const Plan plan{
            .base = base, .world_size = world_size, .precision = precision, .lr = 0.1, .validates_every = 2};
        expect_evaluated_of_recurrence<ByAdamW>(plan);
        expect_evaluated_of_recurrence<ByMomentum>(plan);
      }
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

struct WritesLater : PartOfTheTime {
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    const at::NoGradGuard no_grad;
    if (batch_idx == 5) part.fill_(7.0);
    return BatchAction::run;
  }
};

// The update in progress when the checkpoint is written does not change the parameter.
TEST(DelayedUpdateTest, AWriteToAParameterThatIsNotUpdatedIsKeptAfterAResume) {
  for (const std::string& base : kBases) {
    const testing::TempDir dir;
    const auto fit = [&](const std::string& ckpt_path, std::vector<std::shared_ptr<Callback>> callbacks) {
      const auto module = make_module<WritesLater>();
      const RankOptions small_buckets{.bucket_cap_mib = 1e-4, .first_bucket_mib = 1e-4};
      TrainerOptions options = testing::quiet({.ckpt_path = ckpt_path, .callbacks = std::move(callbacks)});
      options.strategy = DelayedUpdate{.base = base, .warmup_steps = 0, .ranks = small_buckets};
      Trainer(options).fit(module, {.train = testing::tiny_loader(7 * 8, 8)});
      EXPECT_TRUE(module->part.eq(7.0).all().item<bool>()) << base << ", " << ckpt_path;
    };
    fit("", {testing::at_batch_end([&](TrainerControl& trainer) {
          if (trainer.state().batch_idx == 4) trainer.save_checkpoint(dir.path() / "saved");
        })});
    fit(dir.path() / "saved", {});
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

TEST(EvaluatedWeights, AreHiddenAgainAfterAnExceptionThatAHookCatches) {
  struct Catches : Recorded<ByMomentum> {
    int64_t caught = 0;
    void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
      try {
        with_evaluated_weights([] { throw std::runtime_error("the disk is full"); });
      } catch (const std::runtime_error&) {
        ++caught;
      }
    }
  };
  for (const StrategyChoice& strategy :
       {StrategyChoice("single_device"), StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0})}) {
    const auto module = make_module<Catches>();
    Trainer(testing::quiet({.strategy = strategy})).fit(module, {.train = testing::tiny_loader(40, 8)});
    EXPECT_EQ(module->caught, 5);
  }
}

// Trains by an optimizer that carries no direction from one update to the next, because its beta1 is 0.
template <class O>
struct WithoutBeta1 : TinyModule {
  WithoutBeta1() { testing::draw_weights(*this); }
  Optimizers configure_optimizers() override { return O(parameters(), {.lr = 1e-2, .betas = {0.0, 0.9}}); }
};

TEST(DelayedUpdateTest, WithoutMomentumNothingIsExpectedAndThatIsSaidOnce) {
  const auto output_of = [](const auto& module, std::string predict, int64_t warmup = 300) {
    const DelayedUpdate late{.base = "single_device", .predict = std::move(predict), .warmup_steps = warmup};
    ::testing::internal::CaptureStderr();
    Trainer(testing::quiet({.strategy = late})).fit(module, {.train = testing::tiny_loader(40, 8)});
    return ::testing::internal::GetCapturedStderr();
  };
  const auto expect_said_once = [&](const auto& module, const std::string& name) {
    const std::string said = output_of(module, "gradient", /*warmup=*/1);
    const std::string reason = "without a prediction, because " + name + " has no momentum";
    ASSERT_THAT(said, HasSubstr(reason));
    EXPECT_EQ(said.find(reason), said.rfind(reason));
  };
  const auto expect_unpredicted_without_beta1 = [&]<class O>(std::type_identity<O>, const std::string& name) {
    const auto predicted = make_module<WithoutBeta1<O>>(), unpredicted = make_module<WithoutBeta1<O>>();
    expect_said_once(predicted, name);
    EXPECT_THAT(output_of(unpredicted, "none", /*warmup=*/1), Not(HasSubstr("no momentum")));
    EXPECT_EQ(predicted->train_losses, unpredicted->train_losses) << name;
  };
  expect_said_once(make_module<Recorded<BySGD>>(), "SGD");
  expect_unpredicted_without_beta1(std::type_identity<optim::Adam>(), "Adam");
  expect_unpredicted_without_beta1(std::type_identity<optim::AdamW>(), "AdamW");
  expect_unpredicted_without_beta1(std::type_identity<optim::Lion>(), "Lion");
  EXPECT_THAT(output_of(make_module<Recorded<BySGD>>(), "none"), Not(HasSubstr("no momentum")));
  EXPECT_THAT(output_of(make_module<Recorded<ByMomentum>>(), "gradient"),
              HasSubstr("updates are delayed by one step after the first 300 steps, and forward reads weights with"));
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
  EXPECT_THAT(why_refused(DelayedUpdate{.base = "single_device", .ranks = {.transport = "gloo"}}),
              HasSubstr("transport = gloo"));
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
