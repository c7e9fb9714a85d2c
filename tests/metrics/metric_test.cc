#include "fulgur/core/metric.h"

#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <span>

#include "fulgur/metrics/aggregation.h"
#include "fulgur/metrics/auroc.h"
#include "fulgur/metrics/classification.h"
#include "tests/testing/errors.h"

namespace fulgur::metrics {
namespace {

using ::testing::HasSubstr;

TEST(Metric, CombiningRanksLeavesTheirOwnStates) {
  Mean first, second;
  first.update(torch::tensor({1.0, 2.0}));
  second.update(torch::tensor({9.0}));
  const std::vector<MetricStates> ranks{first.states(), second.states()};
  EXPECT_EQ(first.compute(combined(ranks)).item<double>(), 4.0);
  EXPECT_EQ(first.compute(combined(ranks)).item<double>(), 4.0);
  first.update(3.0);
  EXPECT_EQ(first.compute().item<double>(), 2.0);
}

TEST(Metric, ARankWithoutSamplesAddsNothing) {
  AUROC busy({.num_classes = 2}), idle({.num_classes = 2});
  busy.update(torch::tensor({{0.9, 0.1}, {0.2, 0.8}, {0.6, 0.4}}), torch::tensor({0, 1, 1}));
  for (const auto& ranks : {std::vector{busy.states(), idle.states()}, std::vector{idle.states(), busy.states()}}) {
    EXPECT_TRUE(idle.compute(combined(ranks)).equal(busy.compute()));
  }
}

TEST(Metric, WritingToStatesDoesNotChangeTheMetric) {
  Sum sum;
  for (int i = 0; i < 2; ++i) {
    sum.states()[0].value.add_(5.0);
    EXPECT_EQ(sum.compute().item<double>(), i);
    sum.update(1.0);
  }
}

TEST(Metric, GoesOnFromGivenStates) {
  AUROC before({.task = Task::binary}), after({.task = Task::binary}), whole({.task = Task::binary});
  const auto scores = torch::tensor({0.1, 0.7, 0.3, 0.6}), target = torch::tensor({0, 1, 1, 0});
  whole.update(scores, target);
  before.update(scores.narrow(0, 0, 1), target.narrow(0, 0, 1));
  after.set_states(before.states());
  after.update(scores.narrow(0, 1, 3), target.narrow(0, 1, 3));
  EXPECT_TRUE(after.compute().equal(whole.compute()));
}

// The example of core/metric.h, with further updates that add the wrong number of amounts or wrong shapes.
class MeanError final : public Metric {
 public:
  MeanError() : Metric("MeanError", {{"sum", at::zeros({}, at::kDouble)}, {"count", at::zeros({}, at::kLong)}}) {}
  void update(const at::Tensor& preds, const at::Tensor& target) {
    accumulate({(preds - target).abs().sum(), at::scalar_tensor(target.numel(), at::kLong)});
  }
  void forget_the_count() { accumulate({torch::zeros({})}); }
  void add_a_vector() { accumulate({torch::zeros({3}), torch::zeros({})}); }
  void add_nothing() { accumulate({at::Tensor(), torch::zeros({})}); }

 protected:
  at::Tensor value_of(std::span<const at::Tensor> states) const override { return states[0] / states[1]; }
};

TEST(Metric, OneOfYourOwnSaysWhatIsWrongInUpdate) {
  MeanError error;
  const auto told = [&](auto update) { return testing::message_of<c10::ValueError>([&] { (error.*update)(); }); };
  EXPECT_THAT(told(&MeanError::forget_the_count), HasSubstr("MeanError has 2 states, accumulate got 1"));
  EXPECT_THAT(told(&MeanError::add_a_vector),
              HasSubstr("the state 'sum' has the shape [], accumulate got [3]; they must be the same"));
  EXPECT_THAT(told(&MeanError::add_nothing), HasSubstr("accumulate got an undefined tensor for 'sum'"));
  error.update(torch::tensor({1.0, 2.0}), torch::tensor({2.0, 5.0}));
  EXPECT_EQ(error.compute().item<double>(), 2.0);  // failed updates leave nothing behind
}

TEST(Metric, RefusesStatesOfAnotherMetric) {
  Mean mean;
  Sum sum;
  Accuracy of_3({.num_classes = 3}), of_4({.num_classes = 4});
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { mean.set_states(sum.states()); }),
              HasSubstr("Mean has 2 states; got 1"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { (void)of_3.compute(of_4.states()); }),
              HasSubstr("state 0 is 'counts', Long [3, 3]; got 'counts', CPULongType [3, 4]"));
  const std::vector<MetricStates> ranks{mean.states(), sum.states()};
  EXPECT_THROW(combined(ranks), c10::ValueError);
  EXPECT_THROW(combined({}), c10::ValueError);
}

TEST(Metric, CopiesAreIndependent) {
  Sum sum;
  sum.update(1.0);
  Sum copy = sum;
  copy.update(1.0);
  EXPECT_EQ(sum.compute().item<double>(), 1.0);
  EXPECT_EQ(copy.compute().item<double>(), 2.0);
}

TEST(Metric, UpdatesMayBeInInferenceModeAndOutOfIt) {
  Sum sum;
  {
    const c10::InferenceMode inference;
    sum.update(torch::ones({2}));
  }
  sum.update(torch::ones({2}, torch::requires_grad()));
  EXPECT_EQ(sum.compute().item<double>(), 4.0);
  EXPECT_FALSE(sum.compute().requires_grad());
}

TEST(Metric, ScoresAreCopied) {  // reusing the buffer does not change what was counted
  AUROC auroc({.task = Task::binary});
  const auto scores = torch::tensor({0.1F, 0.9F});
  auroc.update(scores, torch::tensor({0, 1}));
  scores.zero_();
  EXPECT_EQ(auroc.compute().item<double>(), 1.0);
}

TEST(Metric, RefusesAMaskThatDoesNotFit) {
  Sum sum;
  const auto message = [&](const at::Tensor& valid) {
    return testing::message_of<c10::ValueError>([&] { sum.update(torch::ones({3, 2}), valid); });
  };
  EXPECT_THAT(message(torch::ones({2}, torch::kBool)), HasSubstr("of shape [3]; got CPUBoolType [2]"));
  EXPECT_THAT(message(torch::ones({3})), HasSubstr("must be a bool tensor"));
  EXPECT_THAT(message(at::Tensor()), HasSubstr("must be a bool tensor"));
  EXPECT_EQ(sum.compute().item<double>(), 0.0);
}

}  // namespace
}  // namespace fulgur::metrics
