#include "fulgur/core/lr_schedule.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "fulgur/base/error.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// A schedule of a warm-up and a plateau, and its optimizer.
struct Scheduled {
  optim::SGD optimizer{std::vector<at::Tensor>{at::zeros({2})}, {.lr = 1.0}};
  LRSchedule schedule{{.scheduler = optim::ChainedScheduler::make(
                           {.schedulers = {optim::LinearLR::make({.start_factor = 0.5, .total_iters = 2}),
                                           optim::ReduceLROnPlateau::make({.factor = 0.1, .patience = 0})}}),
                       .monitor = "loss"},
                      optimizer};
};

TEST(LRSchedule, ContinuesFromItsState) {
  Scheduled first, second;
  for (const double loss : {1.0, 2.0, 2.0}) first.schedule.step(loss);
  second.schedule.load_state(first.schedule.state());
  EXPECT_EQ(second.schedule.num_steps(), 3);
  for (auto* each : {&first, &second}) each->schedule.step(0.5);
  EXPECT_EQ(second.optimizer.groups()[0].lr, first.optimizer.groups()[0].lr);
  EXPECT_NEAR(second.optimizer.groups()[0].lr, 0.01, 1e-12);
}

TEST(LRSchedule, AChainStepsWithoutTheMetricOfItsPlateau) {
  Scheduled chain;
  chain.schedule.step();
  EXPECT_DOUBLE_EQ(chain.optimizer.groups()[0].lr, 0.75);
  EXPECT_EQ(chain.schedule.num_steps(), 1);
  LRSchedule plateau({.scheduler = optim::ReduceLROnPlateau::make(), .monitor = "loss"}, chain.optimizer);
  EXPECT_THAT(message_of<c10::ValueError>([&] { plateau.step(); }), HasSubstr("give its value to step()"));
}

// The group is not in the schedule's state yet, which takes groups in when it moves.
TEST(LRSchedule, GoesOnWithAGroupThatWasAddedAfterItsLastMove) {
  const auto scheduler = [] {
    return LRSchedulerConfig{.scheduler = optim::StepLR::make({.step_size = 1, .gamma = 0.5})};
  };
  optim::SGD first({{.params = {at::zeros({2})}, .lr = 1.0}}, {});
  LRSchedule schedule(scheduler(), first);
  schedule.step({});
  first.add_param_group({.params = {at::zeros({3})}, .lr = 8.0});
  optim::SGD second({{.params = {at::zeros({2})}, .lr = 1.0}, {.params = {at::zeros({3})}, .lr = 8.0}}, {});
  LRSchedule resumed(scheduler(), second);
  resumed.load_state(schedule.state());
  for (LRSchedule* each : {&schedule, &resumed}) each->step({});
  for (const size_t group : {0, 1}) EXPECT_EQ(second.groups()[group].lr, first.groups()[group].lr) << group;
}

State as_before_0_1_0(const std::string& best) {
  State state;
  state.set("scheduler", std::string("ChainedScheduler"));
  state.set("num_steps", int64_t{4});
  state.set("initial_lr/0", 1.0);
  state.set("state",
            R"({"schedulers":[{},{"best":)" + best + R"(,"cooldown_left":0,"num_bad_steps":0,"num_reductions":2}]})");
  return state;
}

TEST(LRSchedule, ReadsTheStateThatCheckpointsHadBeforeVersion010) {
  for (const std::string best : {"0.25", "\"inf\""}) {
    Scheduled resumed;
    resumed.schedule.load_state(as_before_0_1_0(best));
    EXPECT_EQ(resumed.schedule.num_steps(), 4);
    resumed.schedule.step(0.125);  // better than both
    EXPECT_NEAR(resumed.optimizer.groups()[0].lr, 0.01, 1e-12) << best;
  }
}

TEST(LRSchedule, RefusesAnOlderStateThatIsNoJson) {
  State state = as_before_0_1_0("0.25");
  state.set("state", std::string("{\"schedulers\":["));
  EXPECT_THAT(message_of<CheckpointError>([&] { Scheduled{}.schedule.load_state(state); }),
              HasSubstr("the state of ChainedScheduler cannot be read"));
}

}  // namespace
}  // namespace fulgur
