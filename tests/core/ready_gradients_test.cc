#include "fulgur/core/ready_gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <vector>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

// 3 * weight + bias, whose gradients are 3 and 1, with them.
struct Line {
  at::Tensor weight = torch::full({2}, 5.0).requires_grad_(), bias = torch::full({2}, 1.0).requires_grad_();

  at::Tensor loss() const {
    const at::Tensor value = (3 * weight + bias).sum().detach();
    set_ready_gradients(value, {weight, bias}, {torch::full({2}, 3.0), torch::ones({2})});
    return value;
  }
  void expect_gradients(double of_weight, double of_bias) const {
    EXPECT_TRUE(weight.grad().equal(torch::full({2}, of_weight))) << weight.grad();
    EXPECT_TRUE(bias.grad().equal(torch::full({2}, of_bias))) << bias.grad();
  }
};

TEST(ReadyGradients, ReachTheParametersOnBothWays) {
  for (const bool by_engine : {false, true}) {
    const Line line;
    const at::Tensor loss = line.loss();
    EXPECT_EQ(loss.grad_fn()->name(), kReadyGradients);
    by_engine ? loss.backward() : run_backward(loss);
    line.expect_gradients(3, 1);
  }
}

TEST(ReadyGradients, AddUpOnBothWays) {
  const Line line;
  run_backward(line.loss());
  line.loss().backward();
  run_backward(line.loss());
  line.expect_gradients(9, 3);
}

TEST(ReadyGradients, AreScaledByWhatIsComputedFromTheLoss) {
  const Line line;
  run_backward(line.loss() / 2 + line.bias.sum());
  line.expect_gradients(1.5, 1.5);
}

TEST(ReadyGradients, AParameterMayBeThereTwiceOrBeFrozen) {
  for (const bool by_engine : {false, true}) {
    const at::Tensor shared = torch::ones({2}).requires_grad_(), frozen = torch::ones({2});
    const at::Tensor loss = torch::ones({});
    set_ready_gradients(loss, {shared, frozen, shared}, {torch::ones({2}), torch::ones({2}), torch::full({2}, 2.0)});
    by_engine ? loss.backward() : run_backward(loss);
    EXPECT_TRUE(shared.grad().equal(torch::full({2}, 3.0)));
    EXPECT_FALSE(frozen.grad().defined());
  }
}

TEST(ReadyGradients, HooksAreCalled) {
  const std::vector<std::function<void(const Line&, int&)>> ways{
      [](const Line& line, int& calls) {
        line.weight.register_hook([&calls](const at::Tensor& gradient) { return ++calls, gradient * 2; });
      },
      [](const Line& line, int& calls) {
        struct Hook : torch::autograd::FunctionPostHook {
          int& num_calls;
          explicit Hook(int& counter) : num_calls(counter) {}
          torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                    const torch::autograd::variable_list&) override {
            return ++num_calls, outputs;
          }
        };
        torch::autograd::impl::grad_accumulator(line.weight)->add_post_hook(std::make_unique<Hook>(calls));
      }};
  for (size_t i = 0; i < ways.size(); ++i) {
    const Line line;
    int calls = 0;
    const auto kept = torch::autograd::impl::grad_accumulator(line.weight);  // otherwise its hooks go with it
    ways[i](line, calls);
    run_backward(line.loss());
    EXPECT_EQ(calls, 1);
    line.expect_gradients(i == 0 ? 6 : 3, 1);
  }
}

TEST(ReadyGradients, AHookOfTheLossIsCalled) {
  const Line line;
  const at::Tensor loss = line.loss();
  loss.register_hook([](const at::Tensor& gradient) { return gradient * 10; });
  run_backward(loss);
  line.expect_gradients(30, 10);
}

TEST(ReadyGradients, RunOnceAndHaveNoSecondDerivatives) {
  const Line line;
  const at::Tensor loss = line.loss(), another = line.loss();
  run_backward(loss);
  EXPECT_THAT(message_of<c10::Error>([&] { run_backward(loss); }), HasSubstr("runs once"));
  EXPECT_THAT(message_of<c10::Error>([&] { another.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
              HasSubstr("no second derivatives"));
  line.expect_gradients(3, 1);
}

TEST(ReadyGradients, OtherLossesGoTheirUsualWay) {
  const at::Tensor weight = torch::ones({2}).requires_grad_();
  run_backward((weight * 3).sum());
  EXPECT_TRUE(weight.grad().equal(torch::full({2}, 3.0)));
}

TEST(FitForParameter, IsTheGradientItselfIfNothingElseHasItsMemory) {
  const at::Tensor parameter = torch::ones({2, 3}), gradient = torch::full({2, 3}, 2.0);
  EXPECT_EQ(fit_for_parameter(gradient, parameter).const_data_ptr(), gradient.const_data_ptr());
  const at::Tensor view = gradient.view({2, 3});
  EXPECT_NE(fit_for_parameter(gradient, parameter).const_data_ptr(), gradient.const_data_ptr());
}

TEST(FitForParameter, IsACopyOfWhatTwoParametersShareAndOfOtherLayouts) {
  const at::Tensor parameter = torch::ones({2, 3}), gradient = torch::full({2, 3}, 2.0);
  const std::vector<at::Tensor> shared{gradient};
  EXPECT_NE(fit_for_parameter(gradient, parameter).const_data_ptr(), gradient.const_data_ptr());
  for (const at::Tensor& other : {torch::full({3, 2}, 2.0).t(), torch::full({1, 3}, 2.0).expand({2, 3})}) {
    const at::Tensor fit = fit_for_parameter(other, parameter);
    EXPECT_EQ(fit.strides(), parameter.strides());
    EXPECT_TRUE(fit.equal(gradient));
  }
}

}  // namespace
}  // namespace fulgur
