#include "fulgur/callbacks/learning_rate_monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Pair;

// Keeps the learning rates that loggers get, in the order of steps.
class Recorder final : public Callback {
 public:
  std::map<std::string, std::vector<double>> rates;
  void on_metrics(TrainerControl&, const Metrics& metrics, int64_t) override {
    for (const auto& [name, value] : metrics) {
      if (name.starts_with("lr-") || name.starts_with("rate")) rates[name].push_back(value);
    }
  }
};

template <class Net>
std::map<std::string, std::vector<double>> rates_of(const LearningRateMonitor::Options& monitor,
                                                    TrainerOptions options = {}) {
  options.log_every_n_steps = 1;
  const auto recorder = std::make_shared<Recorder>();
  options.callbacks.insert(options.callbacks.end(), {LearningRateMonitor::make(monitor), recorder});
  Trainer(testing::quiet(options)).fit(make_module<Net>(), {.train = testing::tiny_loader(24, 8)});
  return recorder->rates;
}

struct Halving : testing::TinyModule {
  Optimizers configure_optimizers() override {
    return {optim::AdamW(parameters(), {.lr = 0.8, .weight_decay = 0.1}),
            {.scheduler = optim::StepLR::make({.step_size = 1, .gamma = 0.5}), .interval = "step"}};
  }
};

TEST(LearningRateMonitor, LogsTheRateThatEachStepUses) {
  EXPECT_THAT(rates_of<Halving>({}), ElementsAre(Pair("lr-AdamW", ElementsAre(0.8, 0.4, 0.2))));
  EXPECT_THAT(rates_of<Halving>({}, {.max_epochs = 2, .accumulate_grad_batches = 3}),
              ElementsAre(Pair("lr-AdamW", ElementsAre(DoubleEq(0.8), DoubleEq(0.4)))));
}

TEST(LearningRateMonitor, LogsOncePerEpoch) {
  EXPECT_THAT(
      rates_of<Halving>({.logging_interval = "epoch", .log_weight_decay = true}, {.max_epochs = 2}),
      ElementsAre(Pair("lr-AdamW", ElementsAre(0.8, 0.1)), Pair("lr-AdamW-weight_decay", ElementsAre(0.1, 0.1))));
}

struct Groups : testing::TinyModule {
  Groups() { automatic_optimization = false; }
  Optimizers configure_optimizers() override {
    Optimizers all;
    all.add(optim::SGD(
        {{.params = {hidden->weight}, .lr = 1.0, .name = "matrix"}, {.params = {hidden->bias}, .lr = 2.0}}, {}));
    all.add(optim::SGD(out->parameters(), {.lr = 3.0}));
    return all;
  }
  at::Tensor training_step(const Batch& batch, int64_t) override { return loss(batch); }
};

TEST(LearningRateMonitor, NamesOptimizersAndGroups) {
  const auto rates = rates_of<Groups>({.logging_interval = "epoch"});
  EXPECT_THAT(rates, ElementsAre(Pair("lr-SGD-1", ElementsAre(3.0)), Pair("lr-SGD/matrix", ElementsAre(1.0)),
                                 Pair("lr-SGD/pg2", ElementsAre(2.0))));
}

struct Named : Groups {
  Optimizers configure_optimizers() override {
    const LRSchedulerConfig constant{.scheduler = optim::StepLR::make({.step_size = 99}), .name = "rate"};
    Optimizers all;
    all.add(optim::SGD(hidden->parameters(), {.lr = 1.0}));
    all.add(optim::SGD({{.params = {out->weight}, .lr = 2.0}}, {}), constant);
    all.add(optim::SGD({{.params = {out->bias}, .lr = 3.0}}, {}), constant);
    return all;
  }
};

TEST(LearningRateMonitor, TakesTheNameOfASchedule) {
  EXPECT_THAT(
      rates_of<Named>({.logging_interval = "epoch"}),
      ElementsAre(Pair("lr-SGD", ElementsAre(1.0)), Pair("rate", ElementsAre(2.0)), Pair("rate-1", ElementsAre(3.0))));
}

// Trains the second layer from the second epoch on.
class Unfreezes final : public Callback {
 public:
  void on_train_epoch_start(TrainerControl& trainer) override {
    if (trainer.state().epoch != 1) return;
    auto& net = dynamic_cast<testing::TinyModule&>(trainer.module());
    for (auto& param : net.out->parameters()) param.set_requires_grad(true);
    trainer.optimizers()[0].add_param_group({.params = net.out->parameters(), .lr = 0.25, .name = "out"});
  }
};

struct Frozen : testing::TinyModule {
  Frozen() {
    for (auto& param : out->parameters()) param.set_requires_grad(false);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(hidden->parameters(), {.lr = 0.5}); }
};

TEST(LearningRateMonitor, FollowsAGroupThatIsAdded) {
  const auto rates = rates_of<Frozen>({}, {.max_epochs = 2, .callbacks = {std::make_shared<Unfreezes>()}});
  EXPECT_THAT(rates, ElementsAre(Pair("lr-AdamW", ElementsAre(0.5, 0.5, 0.5)),
                                 Pair("lr-AdamW/out", ElementsAre(0.25, 0.25, 0.25)),
                                 Pair("lr-AdamW/pg1", ElementsAre(0.5, 0.5, 0.5))));
}

TEST(LearningRateMonitor, RefusesUnknownIntervalsAndEqualNames) {
  EXPECT_THAT(message_of<UsageError>([] { LearningRateMonitor::make({.logging_interval = "steps"}); }),
              HasSubstr("did you mean 'step'"));
  EXPECT_THAT(message_of<UsageError>([] {
                const testing::TinyModule net;
                optim::SGD({{.params = {net.hidden->weight}, .name = "a"}, {.params = {net.out->weight}, .name = "a"}},
                           {});
              }),
              HasSubstr("SGD: two groups have the name 'a'"));
}

}  // namespace
}  // namespace fulgur
