#include "fulgur/nn/activation_checkpoint.h"

#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <thread>

#include "fulgur/base/autocast.h"
#include "fulgur/base/seed.h"
#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

std::vector<c10::Device> devices() {
  std::vector<c10::Device> devices = {c10::kCPU};
  if (at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0) devices.emplace_back(c10::kCUDA, 0);
  return devices;
}

// Two blocks with dropout, and the tensors whose gradients are compared between two ways to run them.
struct Net : torch::nn::Module {
  torch::nn::Sequential first{nullptr}, second{nullptr};
  at::Tensor x;

  explicit Net(c10::Device device = c10::kCPU) {
    using namespace torch::nn;
    seed_everything(1);
    first = register_module("first", Sequential(Linear(8, 16), GELU(), Dropout(0.5)));
    second = register_module("second", Sequential(Linear(16, 16), Tanh(), Dropout(0.3), Linear(16, 4)));
    to(device);
    x = torch::randn({5, 8}).to(device).requires_grad_();
  }
  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> leaves = parameters();
    leaves.push_back(x);
    return leaves;
  }
};

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
  at::Tensor next_random_number;

  void expect_equal(const Result& other) const {
    EXPECT_TRUE(loss.equal(other.loss));
    ASSERT_EQ(gradients.size(), other.gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) EXPECT_TRUE(gradients[i].equal(other.gradients[i])) << i;
    EXPECT_TRUE(next_random_number.equal(other.next_random_number));
  }
};

template <class Loss>
Result run(c10::Device device, const Loss& loss_of) {
  Net net(device);
  seed_everything(2);
  const at::Tensor loss = loss_of(net);
  loss.backward();
  Result result{.loss = loss.detach(), .gradients = {}, .next_random_number = torch::rand({3}, device)};
  for (const at::Tensor& leaf : net.leaves()) result.gradients.push_back(leaf.grad());
  return result;
}

Result plain(c10::Device device) {
  return run(device, [](Net& net) { return net.second->forward(net.first->forward(net.x)).square().sum(); });
}

at::Tensor checkpointed_loss(Net& net) {
  at::Tensor h = checkpoint([&net](const at::Tensor& in) { return net.first->forward(in); }, net.x);
  h = checkpoint([&net](const at::Tensor& in) { return net.second->forward(in); }, h);
  return h.square().sum();
}

TEST(Checkpoint, GradientsWithDropoutAreEqualBitForBit) {
  for (const c10::Device device : devices()) run(device, checkpointed_loss).expect_equal(plain(device));
}

TEST(Checkpoint, MayBeNested) {
  for (const c10::Device device : devices()) {
    const auto nested = [](Net& net) {
      const auto inner = [&net](const at::Tensor& in) {
        return checkpoint([&net](const at::Tensor& h) { return net.first->forward(h); }, in);
      };
      const auto outer = [&net, inner](const at::Tensor& in) { return net.second->forward(checkpoint(inner, in)); };
      return checkpoint(outer, net.x).square().sum();
    };
    run(device, nested).expect_equal(plain(device));
  }
}

TEST(Checkpoint, WorksUnderAutocast) {
  for (const c10::Device device : devices()) {
    const auto in_autocast = [&](const auto& loss_of) {
      return run(device, [&](Net& net) {
        const ScopedAutocast autocast({.device_type = device.type(), .enabled = true, .dtype = c10::kBFloat16});
        return loss_of(net);
      });
    };
    const auto expected = in_autocast([](Net& net) {
      const at::Tensor out = net.second->forward(net.first->forward(net.x));
      EXPECT_EQ(out.scalar_type(), c10::kBFloat16);
      return out.square().sum();
    });
    in_autocast(checkpointed_loss).expect_equal(expected);
  }
}

TEST(Checkpoint, TakesAndGivesSeveralTensorsAndOtherThings) {
  const auto fn = [](const std::vector<at::Tensor>& tensors, double factor, const at::Tensor& more) {
    return std::pair((tensors[0] * tensors[1]).exp(), torch::dropout(tensors[1].sin() * more * factor, 0.5, true));
  };
  const auto gradients = [&](const auto& call) {
    seed_everything(3);
    const std::vector<at::Tensor> leaves = {torch::randn({4}).requires_grad_(), torch::randn({4}).requires_grad_(),
                                            torch::randn({4}).requires_grad_()};
    const auto [a, b] = call(std::vector(leaves.begin(), leaves.begin() + 2), leaves[2]);
    (a * b).sum().backward();
    return torch::stack({leaves[0].grad(), leaves[1].grad(), leaves[2].grad()});
  };
  const auto expected = gradients([&](const auto& two, const auto& third) { return fn(two, 0.5, third); });
  const auto got = gradients([&](const auto& two, const auto& third) { return checkpoint(fn, two, 0.5, third); });
  EXPECT_TRUE(got.equal(expected));
}

struct CountingHook final : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(int& number) : fired(number) {}
  void operator()(const torch::autograd::Variable&) override { ++fired; }
  int& fired;
};

TEST(Checkpoint, HookOfAWeightUsedInsideAndOutsideFiresOnce) {
  Net net;
  int fired = 0;
  const at::Tensor weight = net.second[0]->as<torch::nn::Linear>()->weight;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountingHook>(fired));
  (checkpointed_loss(net) + weight.square().sum()).backward();
  EXPECT_EQ(fired, 1);
}

TEST(Checkpoint, WithoutGradientsItIsJustTheFunction) {
  int calls = 0;
  const auto fn = [&calls](const at::Tensor& in) { return ++calls, in.exp(); };
  const at::Tensor x = torch::ones({2}).requires_grad_();
  {
    const c10::NoGradGuard no_grad;
    EXPECT_FALSE(checkpoint(fn, x).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    checkpoint(fn, x);
  }
  EXPECT_EQ(calls, 2);
  const at::Tensor nothing_to_do = checkpoint(fn, torch::ones({2}));
  EXPECT_FALSE(nothing_to_do.requires_grad());
  EXPECT_EQ(calls, 3);
}

TEST(Checkpoint, FunctionRunsOncePerBackward) {
  int calls = 0;
  const at::Tensor x = torch::randn({2}).requires_grad_();
  const at::Tensor y = checkpoint([&calls](const at::Tensor& in) { return ++calls, in.exp().sin().cos(); }, x);
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(calls, 2);
  const at::Tensor once = x.grad().clone();
  y.sum().backward();
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(x.grad().equal(2 * once));
  EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }), HasSubstr("second time"));
}

TEST(Checkpoint, SameRegionTwiceOverOneWeight) {
  const auto gradient = [](bool with_checkpoint) {
    seed_everything(4);
    torch::nn::Linear layer(4, 4);
    const Forward fn = [layer](const at::Tensor& in) mutable { return torch::dropout(layer(in), 0.5, true).tanh(); };
    at::Tensor h = torch::ones({2, 4});
    for (int i = 0; i < 3; ++i) h = with_checkpoint ? checkpoint(fn, h) : fn(h);
    h.sum().backward();
    return layer->weight.grad();
  };
  EXPECT_TRUE(gradient(true).equal(gradient(false)));
}

TEST(Checkpoint, PartialAndSecondOrderGradients) {
  const at::Tensor x = torch::randn({3}, at::kDouble).requires_grad_(),
                   w = torch::randn({3}, at::kDouble).requires_grad_();
  const auto fn = [](const at::Tensor& a, const at::Tensor& b) { return (a * b).sin().exp(); };
  const auto second_order = [&](const at::Tensor& y) {
    const at::Tensor dx = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({dx.square().sum()}, {w})[0];
  };
  EXPECT_TRUE(second_order(checkpoint(fn, x, w)).equal(second_order(fn(x, w))));
}

TEST(Checkpoint, GradientsMayBeTakenInsideTheFunction) {
  const at::Tensor x = torch::randn({3}).requires_grad_();
  const auto fn = [](const at::Tensor& in) {
    const at::Tensor y = in.exp().sin();
    return torch::autograd::grad({y.sum()}, {in}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0] * y;
  };
  const at::Tensor expected = torch::autograd::grad({fn(x).sum()}, {x})[0];
  EXPECT_TRUE(torch::autograd::grad({checkpoint(fn, x).sum()}, {x})[0].equal(expected));
}

TEST(Checkpoint, BackwardMayRunOnAnotherThread) {
  Net net;
  seed_everything(2);
  const at::Tensor loss = checkpointed_loss(net);
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(net.x.grad().equal(plain(c10::kCPU).gradients.back()));
}

TEST(Checkpoint, LeavesOtherGraphsAlone) {
  const at::Tensor x = torch::randn({3}).requires_grad_();
  checkpoint([](const at::Tensor& in) { return in.exp(); }, x);
  const at::Tensor y = x.exp();
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(y));
}

TEST(Checkpoint, KeepsNothingButTheInputs) {
  const at::Tensor x = torch::randn({3}).requires_grad_();
  c10::weak_intrusive_ptr<c10::StorageImpl> intermediate(c10::intrusive_ptr<c10::StorageImpl>{});
  const at::Tensor y = checkpoint(
      [&](const at::Tensor& in) {
        const at::Tensor h = in.exp();
        intermediate = c10::weak_intrusive_ptr<c10::StorageImpl>(h.storage().getWeakStorageImpl());
        return h.sin();
      },
      x);
  EXPECT_TRUE(intermediate.expired());
}

TEST(Checkpoint, AnExceptionOfTheFunctionLeavesNoTrace) {
  const at::Tensor x = torch::randn({3}).requires_grad_();
  EXPECT_THROW(checkpoint([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no"); }, x),
               std::runtime_error);
  int calls = 0;
  const at::Tensor y = checkpoint(
      [&calls](const at::Tensor& in) {
        if (++calls == 2) throw std::runtime_error("not again");
        return in.exp();
      },
      x);
  EXPECT_THAT(message_of<std::runtime_error>([&] { y.sum().backward(); }), HasSubstr("not again"));
  x.exp().sum().backward();
}

TEST(Checkpoint, RefusesAFunctionThatDoesSomethingElseTheSecondTime) {
  const at::Tensor x = torch::randn({4}).requires_grad_();
  int calls = 0;
  const at::Tensor other_shape =
      checkpoint([&calls](const at::Tensor& in) { return (++calls == 1 ? in : in.slice(0, 0, 2)).exp().sum(); }, x);
  EXPECT_THAT(message_of<c10::Error>([&] { other_shape.backward(); }),
              ::testing::AllOf(HasSubstr("Float tensor of shape [4] on cpu in forward"), HasSubstr("shape [2] on cpu"),
                               HasSubstr("must do the same both times")));
  calls = 0;
  const at::Tensor fewer =
      checkpoint([&calls](const at::Tensor& in) { return ++calls == 1 ? in.exp().sin().sum() : in.exp().sum(); }, x);
  EXPECT_THAT(message_of<c10::Error>([&] { fewer.backward(); }), HasSubstr("when it was run again"));
}

TEST(Checkpoint, RefusesAWeightOrAnInputThatHasChanged) {
  const at::Tensor w = torch::randn({3, 3}).requires_grad_(), x = torch::randn({2, 3}).requires_grad_();
  const at::Tensor used = checkpoint([w](const at::Tensor& in) { return torch::linear(in, w).exp(); }, x);
  {
    const c10::NoGradGuard no_grad;
    w.add_(1);
  }
  EXPECT_THAT(message_of<c10::Error>([&] { used.sum().backward(); }), HasSubstr("changed in place"));

  const at::Tensor in = torch::randn({3});
  const at::Tensor y = checkpoint([x](const at::Tensor& its_in) { return (its_in * x).exp(); }, in);
  in.add_(1);
  EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }), HasSubstr("inplace operation"));
}

TEST(Checkpoint, ChangesInPlaceOfWhatBackwardNeedsAreFound) {
  const at::Tensor x = torch::randn({3}).requires_grad_();
  const at::Tensor y = checkpoint(
      [](const at::Tensor& in) {
        const at::Tensor h = in.exp();  // backward needs the result of exp()
        h.mul_(2);
        return h.sin();
      },
      x);
  EXPECT_THAT(message_of<c10::Error>([&] { y.sum().backward(); }), HasSubstr("in place"));
}

// A backward over several GPUs has one thread for each GPU, whose replays draw random numbers at the same time.
TEST(Checkpoint, AReplayLeavesTheGeneratorsOfOtherGpusWhereTheyAre) {
  if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() < 2) GTEST_SKIP() << "there are no two GPUs";
  const c10::Device here(c10::kCUDA, 0), other(c10::kCUDA, 1);
  seed_everything(3);
  const at::Tensor x = torch::randn({64}, here).requires_grad_();
  std::vector<at::Tensor> drawn_here, drawn_there;
  const at::Tensor y = checkpoint(
      [&](const at::Tensor& in) {
        drawn_here.push_back(torch::rand({64}, here));
        drawn_there.push_back(torch::rand({64}, other));
        return (in * drawn_here.back()).exp();
      },
      x);
  y.sum().backward();
  drawn_there.push_back(torch::rand({64}, other));
  ASSERT_EQ(drawn_there.size(), 3U);
  EXPECT_TRUE(drawn_here[0].equal(drawn_here[1]));
  EXPECT_FALSE(drawn_there[0].equal(drawn_there[1]));
  EXPECT_FALSE(drawn_there[1].equal(drawn_there[2]));
}

TEST(RandomState, HereIsThatOfTheCpuAndOfTheCurrentGpu) {
  const State here = RandomState::here().state();
  EXPECT_NE(here.find<at::Tensor>("cpu"), nullptr);
  EXPECT_EQ(here.values().size(), at::hasCUDA() ? 2U : 1U);
  const at::Tensor drawn = torch::rand({8});
  const RandomState state(here);
  state.restore();
  EXPECT_TRUE(torch::rand({8}).equal(drawn));
}

}  // namespace
}  // namespace fulgur
