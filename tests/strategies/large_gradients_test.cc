// Gradients that autograd makes in memory that stays from step to step, in that of their buckets if there are several
// ranks.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fulgur/core/make_module.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/mapped_memory.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using testing::run_ranks;

// Three weights of 1 MiB, of which the second enters the loss only sometimes, and biases.
struct Net : torch::nn::Module {
  static constexpr int64_t kWidth = 512;
  torch::nn::Linear first{nullptr}, sometimes{nullptr}, last{nullptr};
  Net() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const c10::NoGradGuard no_grad;
    for (const auto& [name, layer] : {std::pair{"first", &first}, {"sometimes", &sometimes}, {"last", &last}}) {
      *layer = register_module(name, torch::nn::Linear(kWidth, kWidth));
      for (const auto& parameter : (*layer)->parameters()) parameter.normal_(0, 0.05, generator);
    }
  }
  at::Tensor loss(double scale, bool with_sometimes = true) {
    at::Tensor h = first->forward(torch::full({2, kWidth}, scale)).tanh();
    if (with_sometimes) h = sometimes->forward(h).tanh();
    return last->forward(h).square().sum();
  }
  std::vector<at::Tensor> weights() const { return {first->weight, sometimes->weight, last->weight}; }
};

BucketOptions large_alone(const World& world) {
  return {.large_bytes = 4 * Net::kWidth * Net::kWidth, .world_size = world.world_size()};
}

double scale_of(int64_t rank, int64_t step) { return 0.1 * static_cast<double>(1 + rank + 10 * step); }

// One step whose large gradients may be made in the memory of buckets. `with_sometimes`: by rank.
void reduce_large(World& world, Net& net, GradientReducer& reducer, int64_t step,
                  const std::function<bool(int64_t)>& with_sometimes) {
  reducer.begin();
  const at::Tensor loss = net.loss(scale_of(world.rank(), step), with_sometimes(world.rank()));
  {
    const ScopedGradientMemory scope = reducer.open_memory();
    loss.backward();
  }
  std::vector<double> extra;
  reducer.finish(extra);
}

void expect_sums(World& world, Net& net, const std::vector<int64_t>& steps,
                 const std::function<bool(int64_t)>& with_sometimes) {
  Net alone;
  for (const int64_t step : steps) {
    for (int64_t rank = 0; rank < world.world_size(); ++rank) {
      alone.loss(scale_of(rank, step), with_sometimes(rank)).backward();
    }
  }
  for (const auto& item : alone.named_parameters()) {
    const at::Tensor got = net.named_parameters()[item.key()].grad();
    EXPECT_TRUE(torch::allclose(got, item.value().grad(), 1e-4, 1e-5)) << item.key();
  }
}

constexpr auto kAlways = [](int64_t) { return true; };

TEST(LargeGradients, AreReducedWhereAutogradMadeThem) {
  for (const auto& [world_size, shared_memory] :
       {std::pair<int64_t, bool>{1, true}, {2, true}, {3, true}, {2, false}, {3, false}}) {
    run_ranks(world_size, testing::connected(shared_memory), [](World& world) {
      Net net;
      const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
      const FlatParameters flat(net, optimizers, large_alone(world));
      GradientReducer reducer(flat, world.data(), world.control());
      std::set<const void*> places;
      for (int64_t step = 0; step < 3; ++step) {
        net.zero_grad();
        std::map<const c10::TensorImpl*, const void*> made;  // where autograd made the gradient of a parameter
        std::vector<std::pair<at::Tensor, unsigned>> hooks;
        for (const at::Tensor& weight : net.weights()) {
          hooks.emplace_back(weight,
                             weight.register_hook([&made, impl = weight.unsafeGetTensorImpl()](const at::Tensor& grad) {
                               made[impl] = grad.data_ptr();
                             }));
        }
        reduce_large(world, net, reducer, step, kAlways);
        for (const auto& [weight, hook] : hooks) weight.remove_hook(hook);
        for (const at::Tensor& weight : net.weights()) {
          EXPECT_EQ(weight.grad().data_ptr(), made.at(weight.unsafeGetTensorImpl())) << step;
          places.insert(weight.grad().data_ptr());
        }
        expect_sums(world, net, {step}, kAlways);
      }
      EXPECT_EQ(places.size(), net.weights().size());  // the same in all steps
    });
  }
}

TEST(LargeGradients, AreMappedByEveryRank) {
  for (const int64_t world_size : {2, 3}) {
    run_ranks(world_size, [world_size](World& world) {
      Net net;
      const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
      const FlatParameters flat(net, optimizers, large_alone(world));
      GradientReducer reducer(flat, world.data(), world.control());
      world.control().barrier();
      const int64_t before = testing::num_mapped_regions();
      world.control().barrier();
      reduce_large(world, net, reducer, /*step=*/0, kAlways);
      world.control().barrier();
      // The large gradients of a rank have one region, which every rank maps; the small ones have none.
      EXPECT_EQ(testing::num_mapped_regions() - before, world_size * world_size);
      world.control().barrier();
    });
  }
}

TEST(LargeGradients, ThatSomeoneKeepsAreNotWrittenTo) {
  run_ranks(2, [](World& world) {
    Net net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, large_alone(world));
    GradientReducer reducer(flat, world.data(), world.control());
    at::Tensor kept, copy;
    for (int64_t step = 0; step < 8; ++step) {
      net.zero_grad();
      reduce_large(world, net, reducer, step, kAlways);
      expect_sums(world, net, {step}, kAlways);
      if (step > 0) {
        EXPECT_TRUE(kept.equal(copy)) << step;
      }
      if (step % 3 != 0) continue;  // kept for three steps, in which the gradient has no region of its own
      kept = net.last->weight.grad();
      copy = kept.clone();
    }
  });
}

// The regions of fp32 and bf16 parameters have as many bytes, and a gradient may take that of the other.
TEST(LargeGradients, OfTwoDtypesAndOneSize) {
  struct Mixed : torch::nn::Module {
    at::Tensor single = register_parameter("single", torch::ones({1 << 18}));
    at::Tensor half = register_parameter("half", torch::ones({1 << 19}, at::kBFloat16));
  };
  for (const int64_t world_size : {2, 3}) {
    run_ranks(world_size, [](World& world) {
      const Mixed mixed;
      const Optimizers optimizers(optim::SGD(mixed.parameters(), {.lr = 1.0}));
      const FlatParameters flat(mixed, optimizers, large_alone(world));
      GradientReducer reducer(flat, world.data(), world.control());
      for (int64_t step = 0; step < 4; ++step) {
        mixed.single.mutable_grad().reset();
        mixed.half.mutable_grad().reset();
        const bool uses_single = step % 2 == 0 || world.rank() == 0, uses_half = step % 2 == 1 || world.rank() == 1;
        at::Tensor loss = torch::zeros({}, torch::requires_grad());
        if (uses_single) loss = loss + mixed.single.sum() * 2;
        if (uses_half) loss = loss + mixed.half.sum().to(at::kFloat) * 4;
        reducer.begin();
        {
          const ScopedGradientMemory scope = reducer.open_memory();
          loss.backward();
        }
        std::vector<double> extra;
        reducer.finish(extra);
        const double all = static_cast<double>(world.world_size());
        EXPECT_TRUE(mixed.single.grad().eq(step % 2 == 0 ? 2 * all : 2).all().item<bool>()) << step;
        EXPECT_TRUE(mixed.half.grad().eq(step % 2 == 1 ? 4 * all : 4).all().item<bool>()) << step;
      }
    });
  }
}

TEST(LargeGradients, OfSomeRanksOnlyAreAddedToZeros) {
  run_ranks(3, [](World& world) {
    Net net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, large_alone(world));
    GradientReducer reducer(flat, world.data(), world.control());
    for (int64_t step = 0; step < 3; ++step) {
      const auto with_sometimes = [step](int64_t rank) { return (rank + step) % 3 == 0; };
      net.zero_grad();
      reduce_large(world, net, reducer, step, with_sometimes);
      expect_sums(world, net, {step}, with_sometimes);
    }
  });
}

TEST(LargeGradients, OfSeveralMicroBatchesAddUpWhereTheyAre) {
  run_ranks(2, [](World& world) {
    Net net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, large_alone(world));
    GradientReducer reducer(flat, world.data(), world.control());
    for (const int64_t first : {0, 2}) {
      net.zero_grad();
      {
        const ScopedGradientMemory scope = reducer.open_memory();
        net.loss(scale_of(world.rank(), first)).backward();
      }
      const void* const place = net.first->weight.grad().data_ptr();
      reduce_large(world, net, reducer, first + 1, kAlways);
      EXPECT_EQ(net.first->weight.grad().data_ptr(), place);
      expect_sums(world, net, {first, first + 1}, kAlways);
    }
  });
}

// The gradients of both parameters are views of the same memory.
struct Sum : torch::nn::Module {
  at::Tensor first = register_parameter("first", torch::ones({1 << 18}));
  at::Tensor second = register_parameter("second", torch::ones({1 << 12, 64}));
  at::Tensor loss(double scale) const {
    return ((first.view({-1, 32}) + second.view({-1, 32})) * scale).square().sum();
  }
};

TEST(LargeGradients, InTheSameMemoryAreSummedOnce) {
  run_ranks(2, [](World& world) {
    const Sum sum;
    const Optimizers optimizers(optim::SGD(sum.parameters(), {.lr = 1.0}));
    const FlatParameters flat(sum, optimizers, large_alone(world));
    GradientReducer reducer(flat, world.data(), world.control());
    for (int step = 0; step < 2; ++step) {
      sum.first.mutable_grad().reset();
      sum.second.mutable_grad().reset();
      reducer.begin();
      {
        const ScopedGradientMemory scope = reducer.open_memory();
        sum.loss(static_cast<double>(1 + world.rank())).backward();
      }
      std::vector<double> extra;
      reducer.finish(extra);
      EXPECT_TRUE(sum.first.grad().eq(4 * (1 + 4)).all().item<bool>());  // the derivative of (2 s)^2 by one of the two
      EXPECT_TRUE(sum.second.grad().eq(4 * (1 + 4)).all().item<bool>());
    }
  });
}

TEST(LargeGradients, OfBucketsThatWereAppended) {
  run_ranks(2, [](World& world) {
    Net net;
    net.sometimes->weight.set_requires_grad(false);
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    FlatParameters flat(net, optimizers, large_alone(world));
    GradientReducer reducer(flat, world.data(), world.control());
    reduce_large(world, net, reducer, 0, kAlways);
    net.sometimes->weight.set_requires_grad(true);
    flat.append(net, optimizers, large_alone(world));
    reducer.append();
    for (int64_t step = 1; step < 3; ++step) {
      net.zero_grad();
      reduce_large(world, net, reducer, step, kAlways);
      expect_sums(world, net, {step}, kAlways);
    }
  });
}

// Two weights with known gradients. Before each backward other tensors take the memory that the dropped gradients had.
struct Known : Module {
  static constexpr int64_t kSize = 1 << 18;
  std::vector<at::Tensor> weights{register_parameter("first", torch::zeros({kSize})),
                                  register_parameter("second", torch::zeros({512, kSize / 512}))};
  std::vector<at::Tensor> others{};
  std::set<const void*> places{};

  static at::Tensor gradient_of(int64_t rank, int64_t step, size_t weight) {
    const auto generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * rank + 10 * step) + weight);
    return torch::randn({kSize}, generator);
  }
  at::Tensor training_step(const Batch&, int64_t batch_idx) override {
    at::Tensor loss = torch::zeros({});
    for (size_t w = 0; w < weights.size(); ++w) {
      loss = loss + (weights[w] * gradient_of(global_rank(), batch_idx, w).view_as(weights[w])).sum();
    }
    return loss;
  }
  void on_before_backward(const at::Tensor&) override {
    for (int i = 0; i < 4; ++i) others.push_back(torch::empty({kSize}));
  }
  void on_before_optimizer_step(Optimizer&) override {
    for (const at::Tensor& weight : weights) places.insert(weight.grad().data_ptr());
  }
  Optimizers configure_optimizers() override { return optim::SGD(parameters(), {.lr = 1.0}); }
};

TEST(LargeGradients, HaveBucketsToThemselvesWhereAutogradMakesThemThere) {
  constexpr int64_t kMib = 1 << 20;
  const EngineOptions ddp{.buckets = {.bucket_cap_bytes = 25 * kMib}};
  EXPECT_EQ(ddp.buckets_for(2, c10::kCPU).large_bytes, kMib);
  for (const auto& [options, world_size, device] : {std::tuple{ddp, 1, c10::kCPU},
                                                    {ddp, 2, c10::kCUDA},
                                                    {EngineOptions{.wire = at::kBFloat16}, 2, c10::kCPU},
                                                    {EngineOptions{.shard = true}, 2, c10::kCPU},
                                                    {EngineOptions{.host_ratio = 1}, 2, c10::kCPU}}) {
    EXPECT_EQ(options.buckets_for(world_size, device).large_bytes, BucketOptions().large_bytes);
  }
}

TEST(LargeGradients, StayInTheSameMemoryFromStepToStep) {
  constexpr int64_t kSteps = 4;
  for (const auto& [world_size, strategy] :
       {std::pair<int64_t, StrategyChoice>{1, "single_device"}, {1, "ddp"}, {2, "ddp"}, {3, "ddp"}}) {
    SCOPED_TRACE(strategy.name() + " on " + std::to_string(world_size));
    std::vector<at::Tensor> expected;
    for (size_t w = 0; w < 2; ++w) {
      expected.push_back(torch::zeros({Known::kSize}, at::kDouble));
      for (int64_t i = 0; i < world_size * kSteps; ++i) {
        expected.back() -= Known::gradient_of(i % world_size, i / world_size, w).to(at::kDouble) / world_size;
      }
    }
    run_ranks(world_size, [&](World&) {
      const auto module = make_module<Known>();
      Trainer(testing::quiet({.strategy = strategy, .devices = world_size, .max_steps = kSteps}))
          .fit(module, {.train = testing::tiny_loader(40 * world_size)});
      EXPECT_EQ(module->places.size(), 2);
      for (size_t w = 0; w < 2; ++w) {
        EXPECT_TRUE(torch::allclose(module->weights[w].flatten().to(at::kDouble), expected[w], 1e-5, 1e-5)) << w;
      }
    });
  }
}

}  // namespace
}  // namespace fulgur
