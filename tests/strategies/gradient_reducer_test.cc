#include "fulgur/strategies/engine/gradient_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/device/stream_worker.h"
#include "fulgur/optim/sgd.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/errors.h"
#include "tests/testing/others_have_the_same.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;
using testing::run_ranks;

// Three layers; the second enters the loss only sometimes.
struct Net : torch::nn::Module {
  torch::nn::Linear first{nullptr}, sometimes{nullptr}, last{nullptr};
  Net() {
    first = register_module("first", torch::nn::Linear(6, 5));
    sometimes = register_module("sometimes", torch::nn::Linear(5, 5));
    last = register_module("last", torch::nn::Linear(5, 1));
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.normal_(0, 1, generator);
  }
  at::Tensor loss(const at::Tensor& x, bool with_sometimes) {
    at::Tensor h = first->forward(x).tanh();
    if (with_sometimes) h = sometimes->forward(h).tanh();
    return last->forward(h).pow(2).sum();
  }
};

at::Tensor input_of(int64_t rank, int64_t micro_batch) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * rank + micro_batch));
  return torch::randn({4, 6}, generator);
}

struct Case {
  int64_t world_size;
  int64_t bucket_bytes;
  bool rank_order = false;
};

class Reducing : public ::testing::TestWithParam<Case> {
 protected:
  // Runs `body` on each rank with a flattened Net and a reducer.
  template <class Body>
  void on_ranks(const Body& body) const {
    const Case& params = GetParam();
    run_ranks(params.world_size, [&](World& world) {
      Net net;
      const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
      const FlatParameters flat(net, optimizers,
                                {.first_bucket_bytes = params.bucket_bytes,
                                 .bucket_cap_bytes = params.bucket_bytes,
                                 .world_size = world.world_size()});
      GradientReducer reducer(flat, world.data(), world.control(), {.rank_order = params.rank_order});
      body(world, net, reducer);
    });
  }
};

// Gradients of the sum of all ranks' losses, by autograd alone.
std::map<std::string, at::Tensor> expected_gradients(int64_t world_size, int64_t micro_batches,
                                                     const std::function<bool(int64_t rank)>& uses_sometimes) {
  Net net;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    for (int64_t i = 0; i < micro_batches; ++i) net.loss(input_of(rank, i), uses_sometimes(rank)).backward();
  }
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : net.named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

void expect_gradients(const Net& net, const std::map<std::string, at::Tensor>& expected) {
  for (const auto& item : net.named_parameters()) {
    const at::Tensor& wanted = expected.at(item.key());
    ASSERT_EQ(item.value().grad().defined(), wanted.defined()) << item.key();
    if (wanted.defined()) {
      EXPECT_TRUE(torch::allclose(item.value().grad(), wanted, 1e-5, 1e-6)) << item.key();
    }
  }
}

TEST_P(Reducing, SumsGradientsOverRanks) {
  const auto expected = expected_gradients(GetParam().world_size, 1, [](int64_t) { return true; });
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      reducer.begin();
      net.loss(input_of(world.rank(), 0), true).backward();
      std::vector<double> extra{1.0, static_cast<double>(world.rank())};
      reducer.finish(extra);
      const auto n = static_cast<double>(world.world_size());
      EXPECT_THAT(extra, ::testing::ElementsAre(n, n * (n - 1) / 2));
      expect_gradients(net, expected);
    }
  });
}

TEST_P(Reducing, MicroBatchesBeforeTheLastStayAtHome) {
  const auto expected = expected_gradients(GetParam().world_size, 3, [](int64_t) { return true; });
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    for (int64_t i = 0; i < 3; ++i) {
      if (i == 2) reducer.begin();
      net.loss(input_of(world.rank(), i), true).backward();
    }
    std::vector<double> extra;
    reducer.finish(extra);
    expect_gradients(net, expected);
  });
}

TEST_P(Reducing, WithoutAHeadStartTheSameSums) {
  const auto expected = expected_gradients(GetParam().world_size, 1, [](int64_t) { return true; });
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    if (world.rank() == 0) reducer.begin();  // ranks need not agree on begin()
    net.loss(input_of(world.rank(), 0), true).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    expect_gradients(net, expected);
  });
}

TEST_P(Reducing, UsedOnOneRankCountsAsUsed) {
  const auto uses = [](int64_t rank) { return rank == 0; };
  const auto expected = expected_gradients(GetParam().world_size, 1, uses);
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    reducer.begin();
    net.loss(input_of(world.rank(), 0), uses(world.rank())).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    expect_gradients(net, expected);
  });
}

TEST_P(Reducing, UnusedOnAllRanksHasNoGradient) {
  const auto expected = expected_gradients(GetParam().world_size, 1, [](int64_t) { return false; });
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    reducer.begin();
    net.loss(input_of(world.rank(), 0), false).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    expect_gradients(net, expected);
  });
}

TEST_P(Reducing, EveryRankHasTheSameBits) {
  std::mutex mutex;
  std::vector<at::Tensor> by_rank(static_cast<size_t>(GetParam().world_size));
  on_ranks([&](World& world, Net& net, GradientReducer& reducer) {
    reducer.begin();
    net.loss(input_of(world.rank(), 0), true).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    std::vector<at::Tensor> parts;
    for (const auto& parameter : net.parameters()) parts.push_back(parameter.grad().flatten());
    const std::lock_guard lock(mutex);
    by_rank[static_cast<size_t>(world.rank())] = torch::cat(parts);
  });
  for (const at::Tensor& gradients : by_rank) EXPECT_TRUE(gradients.equal(by_rank[0]));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Reducing,
                         ::testing::Values(Case{2, 1 << 20}, Case{2, 64}, Case{3, 256}, Case{4, 64},
                                           Case{3, 256, /*rank_order=*/true}),
                         [](const auto& test) {
                           return "R" + std::to_string(test.param.world_size) + "Bytes" +
                                  std::to_string(test.param.bucket_bytes) + (test.param.rank_order ? "RankOrder" : "");
                         });

// Each weight has more elements than a small all_reduce takes, which adds in the order of ranks anyway.
struct WideNet : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 3000));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(3000, 6));
  WideNet() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.normal_(0, 1, generator);
  }
  at::Tensor loss(const at::Tensor& x) { return last->forward(first->forward(x).tanh()).pow(2).sum(); }
};

// The sums of three ranks over Gloo, whose own all_reduce adds in an order that depends on where an element lies.
at::Tensor sums_over_gloo(int64_t bucket_bytes, bool rank_order) {
  at::Tensor sums;
  WorldOptions gloo{.timeout_s = testing::kRanksTimeoutS, .heartbeat_interval_s = 0.1};
  gloo.collectives.shared_memory = false;
  run_ranks(3, gloo, [&](World& world) {
    WideNet net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(
        net, optimizers,
        {.first_bucket_bytes = bucket_bytes, .bucket_cap_bytes = bucket_bytes, .world_size = world.world_size()});
    GradientReducer reducer(flat, world.data(), world.control(), {.rank_order = rank_order});
    net.loss(input_of(world.rank(), 0)).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    if (world.rank() != 0) return;
    std::vector<at::Tensor> parts;
    for (const auto& parameter : net.parameters()) parts.push_back(parameter.grad().flatten());
    sums = torch::cat(parts);
  });
  return sums;
}

TEST(GradientReducer, RankOrderMakesBucketsInvisible) {
  const int64_t one_parameter = 64, all = 1 << 20;
  EXPECT_TRUE(sums_over_gloo(one_parameter, /*rank_order=*/true).equal(sums_over_gloo(all, /*rank_order=*/true)));
  EXPECT_FALSE(sums_over_gloo(one_parameter, /*rank_order=*/false).equal(sums_over_gloo(all, /*rank_order=*/false)));
}

// Each rank keeps the sums of whole buckets, which are reduced in place.
TEST(GradientReducer, SumsOfWholeBucketsAreReducedWhereTheyStay) {
  for (const auto& [world_size, has_copy_worker] :
       {std::pair<int64_t, bool>{1, false}, {1, true}, {2, false}, {2, true}}) {
    run_ranks(world_size, [&](World& world) {
      Net net;
      const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
      const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
      std::vector<at::Tensor> memory;
      StreamWorker copy_worker(at::kCPU);
      GradientReducer reducer(
          flat, world.data(), world.control(),
          {.make_sums =
               [&](size_t b) { return std::vector{memory.emplace_back(at::zeros_like(flat.buckets()[b].flat))}; },
           .copy_worker = has_copy_worker ? &copy_worker : nullptr});
      for (int64_t i = 0; i < 2; ++i) {
        reducer.begin(/*takes_norms=*/i == 1);
        net.loss(input_of(world.rank(), i), /*with_sometimes=*/i == 0).backward();
        std::vector<double> extra;
        reducer.finish(extra);
      }
      const auto expected = expected_gradients(world.world_size(), 1, [](int64_t) { return true; });
      const auto others = [&] {
        Net other;
        for (int64_t rank = 0; rank < world.world_size(); ++rank) other.loss(input_of(rank, 1), false).backward();
        std::map<std::string, at::Tensor> gradients;
        for (const auto& item : other.named_parameters()) gradients[item.key()] = item.value().grad();
        return gradients;
      }();
      for (size_t b = 0; b < flat.buckets().size(); ++b) {
        const at::Tensor sum = reducer.sums().of(b).at(0);
        EXPECT_TRUE(sum.is_same(memory[b])) << b;
        bool is_in_both = true;
        for (const auto& slot : flat.buckets()[b].slots) {
          at::Tensor wanted = expected.at(slot.name).flatten();
          if (others.at(slot.name).defined()) wanted = wanted + others.at(slot.name).flatten();
          is_in_both = is_in_both && others.at(slot.name).defined();
          EXPECT_TRUE(torch::allclose(sum.narrow(0, slot.begin, slot.num_elements), wanted, 1e-5, 1e-6)) << slot.name;
        }
        if (!is_in_both) continue;  // the second micro-batch has no gradient for it
        ASSERT_EQ(reducer.sums().norms(b).size(), 1U) << b;
        EXPECT_DOUBLE_EQ(reducer.sums().norms(b)[0].item<double>(), sum.to(at::kDouble).norm().item<double>()) << b;
      }
    });
  }
}

// Each parameter fills a bucket.
struct Tables : torch::nn::Module {
  at::Tensor first, second;
  explicit Tables(int64_t rows) {
    first = register_parameter("first", torch::ones({rows * 64}));
    second = register_parameter("second", torch::ones({rows, 64}));
  }
  // The gradients of both are views of the same memory.
  at::Tensor loss_of_sum(double scale) const {
    return ((first.view({-1, 32}) + second.view({-1, 32})) * scale).square().sum();
  }
  at::Tensor loss_of_product(double scale) const { return (first.view_as(second) * second * scale).square().sum(); }
};

// Options for the sums of a rank's range of each bucket, in memory that `make_sums` makes.
ReduceOptions sharded_sums(const FlatParameters& flat, int64_t world_size) {
  return {.shard = true, .make_sums = [&flat, world_size](size_t b) {
            const at::Tensor& whole = flat.buckets()[b].flat;
            return std::vector{at::zeros({whole.numel() / world_size}, whole.options())};
          }};
}

TEST(GradientReducer, AGradientThatFillsItsBucketTakesNoOtherMemory) {
  constexpr int64_t kRows = 1000, kWorldSize = 2;
  testing::CountingAllocator memory;
  const auto group = std::make_shared<testing::OthersHaveTheSame>(kWorldSize);
  const Tables tables(kRows);
  const Optimizers optimizers(optim::SGD(tables.parameters(), {.lr = 1.0}));
  const FlatParameters flat(tables, optimizers,
                            {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = kWorldSize});
  ASSERT_EQ(flat.buckets().size(), 2U);
  GradientReducer reducer(flat, *group, *group, sharded_sums(flat, kWorldSize));
  const int64_t before = memory.live();
  for (int step = 0; step < 2; ++step) {
    reducer.sums().clear();
    reducer.begin();
    tables.loss_of_product(1.0).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    EXPECT_LT(memory.live() - before, 4 * kRows * 64 / 10);  // a copied bucket would stay in the pool
    EXPECT_EQ(reducer.sums().of(0).at(0).max().item<float>(), 2.0F);
    EXPECT_EQ(reducer.sums().of(0).at(0).min().item<float>(), 2.0F);
  }
}

// Sums of which nobody knows whether they have arrived, before it waits for them.
struct NeverKnown final : testing::OthersHaveTheSame {
  using testing::OthersHaveTheSame::OthersHaveTheSame;
  Work reduce_scatter(at::Tensor flat, ReduceOp op, at::Tensor into) override {
    OthersHaveTheSame::reduce_scatter(flat, op, into).wait();
    return Work([] {});
  }
};

// Bytes that a backward through ten layers takes for buckets at most.
int64_t bucket_memory(Collective& group, bool may_wait_for_memory) {
  constexpr int64_t kWidth = 256, kLayers = 10;
  testing::CountingAllocator memory;
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
  const Optimizers optimizers(optim::SGD(net->parameters(), {.lr = 1.0}));
  const FlatParameters flat(
      *net, optimizers,
      {.first_bucket_bytes = 64, .bucket_cap_bytes = 4 * kWidth * (kWidth + 1), .world_size = group.world_size()});
  ReduceOptions options = sharded_sums(flat, group.world_size());
  options.may_wait_for_memory = may_wait_for_memory;
  GradientReducer reducer(flat, group, group, options);
  const at::Tensor x = torch::ones({1, kWidth});
  int64_t most = 0;
  for (int step = 0; step < 2; ++step) {
    reducer.sums().clear();
    reducer.begin();
    const at::Tensor loss = net->forward(x).sum();
    const int64_t before = memory.live();
    memory.reset_peak();
    loss.backward();
    std::vector<double> extra;
    reducer.finish(extra);
    most = memory.peak() - before;
  }
  return most / (4 * kWidth * kWidth);
}

TEST(GradientReducer, WithoutWaitingTakesTheMemoryOfSumsThatHaveArrived) {
  testing::OthersHaveTheSame arrives_at_once(2);
  NeverKnown never_known(2);
  const int64_t waiting = bucket_memory(never_known, /*may_wait_for_memory=*/true);
  EXPECT_EQ(bucket_memory(arrives_at_once, false), waiting);
  EXPECT_GE(bucket_memory(never_known, false), waiting + 5);
}

TEST(GradientReducer, GradientsInTheSameMemoryAreSummedOnce) {
  for (const bool reduces_during_backward : {false, true}) {
    run_ranks(2, [reduces_during_backward](World& world) {
      const Tables tables(2);
      const Optimizers optimizers(optim::SGD(tables.parameters(), {.lr = 1.0}));
      const FlatParameters flat(tables, optimizers,
                                {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = 2});
      ASSERT_EQ(flat.buckets().size(), 2U);
      GradientReducer reducer(flat, world.data(), world.control(), sharded_sums(flat, 2));
      for (int micro_batch = 1; micro_batch <= 2; ++micro_batch) {  // what is added to sums is reduced in place
        if (reduces_during_backward) reducer.begin();
        tables.loss_of_sum(world.rank() == 0 ? 1.0 : 2.0).backward();
        std::vector<double> extra;
        reducer.finish(extra);
        for (size_t b = 0; b < 2; ++b) {
          const at::Tensor sum = reducer.sums().of(b).at(0);
          EXPECT_TRUE(sum.eq(micro_batch * 2 * 2.0 * (1 + 4)).all().item<bool>())
              << "reduces_during_backward: " << reduces_during_backward << ", rank " << world.rank() << ", micro-batch "
              << micro_batch << ", bucket " << b << ": from " << sum.min().item<double>() << " to "
              << sum.max().item<double>();
        }
      }
    });
  }
}

// Sums of micro-batches may have a wider type: all are exact, also the first, and lie in the memory made for them.
TEST(GradientReducer, SumsMayBeWiderThanGradients) {
  for (const int64_t world_size : {1, 2}) {
    run_ranks(world_size, [](World& world) {
      Tables tables(2);
      tables.to(at::kBFloat16);
      const Optimizers optimizers(optim::SGD(tables.parameters(), {.lr = 1.0}));
      const FlatParameters flat(tables, optimizers);
      std::vector<at::Tensor> memory;
      GradientReducer reducer(flat, world.data(), world.control(), {.make_sums = [&](size_t b) {
                                const at::Tensor& whole = flat.buckets()[b].flat;
                                return std::vector{memory.emplace_back(at::zeros({whole.numel()}, at::kFloat))};
                              }});
      const auto reduce = [&](double scale) {
        reducer.begin();
        tables.loss_of_sum(scale).backward();
        std::vector<double> extra;
        reducer.finish(extra);
      };
      reduce(16.0);  // gradients of 1024 and 4 per rank, whose sum bfloat16 cannot hold
      reduce(1.0);
      const at::Tensor sum = reducer.sums().of(0).at(0);
      EXPECT_TRUE(sum.is_same(memory.at(0)));
      EXPECT_EQ(sum.max().item<float>(), static_cast<float>(1028 * world.world_size()));
      EXPECT_EQ(sum.min().item<float>(), sum.max().item<float>());
      for (int step = 0; step < 3; ++step) {
        const std::vector<at::Tensor> taken = reducer.sums().take(0);
        reduce(1.0);
        reducer.sums().give_back(0, taken);
      }
      EXPECT_EQ(memory.size(), flat.buckets().size() + 1);  // memory that was given back is used again; no third one
    });
  }
}

TEST(GradientReducer, SumsThatWereTakenAreNotWrittenTo) {
  Net net;
  World alone;
  const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
  const FlatParameters flat(net, optimizers);
  GradientReducer reducer(flat, alone.data(), alone.control(),
                          {.make_sums = [&](size_t b) { return std::vector{at::zeros_like(flat.buckets()[b].flat)}; }});
  const auto reduce = [&](int64_t micro_batch) {
    reducer.sums().clear();
    reducer.begin();
    net.loss(input_of(0, micro_batch), true).backward();
    std::vector<double> extra;
    reducer.finish(extra);
  };
  reduce(0);
  const std::vector<at::Tensor> taken = reducer.sums().take(0);
  const at::Tensor before = taken[0].clone();
  reduce(1);
  EXPECT_TRUE(taken[0].equal(before));
  EXPECT_FALSE(reducer.sums().of(0)[0].equal(before));
  reducer.sums().give_back(0, taken);
  const at::Tensor second = reducer.sums().take(0)[0];
  reduce(2);
  EXPECT_TRUE(reducer.sums().of(0)[0].is_same(taken[0]));
  EXPECT_FALSE(second.is_same(taken[0]));
}

// Rank 0 of several that records each send with the bucket's number of elements.
class NotesSending final : public Collective {
 public:
  explicit NotesSending(std::vector<std::string>& events, int64_t world_size = 1)
      : events_(events), world_size_(world_size) {}
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return world_size_; }
  Work all_reduce(at::Tensor flat, ReduceOp) override {
    events_.push_back("all_reduce of " + std::to_string(flat.numel()));
    return {};
  }
  Work reduce_scatter(at::Tensor, ReduceOp, at::Tensor) override { return {}; }
  Work all_gather(at::Tensor) override { return {}; }
  Work broadcast(at::Tensor, int64_t) override { return {}; }
  void barrier() override {}
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>&) override { return nullptr; }
  void abort(const std::string&) noexcept override {}

 private:
  std::vector<std::string>& events_;
  int64_t world_size_;
};

// Layers that backward reaches in another order than the reverse of their registration.
struct OutOfOrder : torch::nn::Module {
  torch::nn::Linear body_1{nullptr}, body_2{nullptr}, stem{nullptr};
  OutOfOrder() {
    body_1 = register_module("body_1", linear(2));  // buckets of 128, 192 and 64 elements
    body_2 = register_module("body_2", linear(3));
    stem = register_module("stem", linear(1));
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(4);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.normal_(0, 0.1, generator);
  }
  static torch::nn::Linear linear(int64_t scale) {
    return torch::nn::Linear(torch::nn::LinearOptions(64, scale).bias(false));
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor h = stem->forward(x).expand({-1, 64});
    const at::Tensor g = body_1->forward(h).sum(1, /*keepdim=*/true).expand({-1, 64});
    return body_2->forward(g).square().sum();
  }
};

TEST(GradientReducer, LaunchesInTheOrderInWhichTheFirstBackwardFilledTheBuckets) {
  for (const bool keeps_sums : {false, true}) {
    OutOfOrder net;
    World alone;
    std::vector<std::string> events;
    NotesSending data(events);
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
    ReduceOptions options;
    if (keeps_sums) {
      options.make_sums = [&](size_t b) { return std::vector{at::zeros_like(flat.buckets()[b].flat)}; };
    }
    GradientReducer reducer(flat, data, alone.control(), options);
    net.stem->weight.register_hook([&](const at::Tensor&) { events.push_back("backward comes to the stem"); });
    const auto reduce = [&] {
      events.clear();
      net.zero_grad();
      if (keeps_sums) reducer.sums().clear();
      reducer.begin();
      net.loss(torch::ones({2, 64})).backward();
      events.push_back("backward ends");
      std::vector<double> extra;
      reducer.finish(extra);
    };
    reduce();
    EXPECT_THAT(events, ::testing::Contains("all_reduce of 192")) << keeps_sums;
    EXPECT_EQ(events[0], "backward comes to the stem") << keeps_sums;  // everything waits for the stem
    reduce();
    EXPECT_EQ(events[0], "all_reduce of 192") << keeps_sums;
    if (!keeps_sums) continue;  // the ranks' message is sent with the bucket of body_1, which goes last
    EXPECT_THAT(events, ElementsAre("all_reduce of 192", "all_reduce of 128", "backward comes to the stem",
                                    "all_reduce of 64", "backward ends"));
  }
}

// Counts the messages that do not go with a bucket.
class CountsMessages final : public testing::OthersHaveTheSame {
 public:
  explicit CountsMessages(int64_t& count) : OthersHaveTheSame(2), count_(count) {}
  Work all_reduce(at::Tensor flat, ReduceOp op) override {
    ++count_;
    return OthersHaveTheSame::all_reduce(flat, op);
  }

 private:
  int64_t& count_;
};

// Ranks of a model that is routed, or trained in parts: only the end of the first step tells what was used in it.
TEST(GradientReducer, WhatNoRankUsesIsNotSentAgain) {
  OutOfOrder net;
  std::vector<std::string> events;
  int64_t num_messages = 0;
  NotesSending data(events, 2);
  CountsMessages control(num_messages);
  const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
  const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = 1});
  GradientReducer reducer(flat, data, control);
  const auto reduce = [&](const at::Tensor& loss) {
    events.clear();
    num_messages = 0;
    net.zero_grad();
    reducer.begin();
    loss.backward();
    std::vector<double> extra{3};
    reducer.finish(extra);
    return events;
  };
  const auto of_part = [&] { return net.body_2->forward(torch::ones({2, 64})).square().sum(); };
  const auto of_all = [&] { return net.loss(torch::ones({2, 64})); };
  EXPECT_EQ(reduce(of_part()).size(), 3);
  EXPECT_EQ(num_messages, 0);
  for (int step = 0; step < 2; ++step) {
    EXPECT_THAT(reduce(of_part()), ElementsAre("all_reduce of 192"));
    EXPECT_EQ(num_messages, 1);
    EXPECT_FALSE(net.stem->weight.grad().defined());
  }
  EXPECT_EQ(reduce(of_all()).size(), 3);
  EXPECT_EQ(num_messages, 1);
  EXPECT_TRUE(net.stem->weight.grad().defined());
  EXPECT_EQ(reduce(of_all()).size(), 3);
  EXPECT_EQ(num_messages, 0);
}

TEST(GradientReducer, RanksMayUseOtherPartsInEveryStep) {
  enum Part { none, part, all };
  const std::vector<std::pair<Part, Part>> steps{{part, part}, {part, none}, {none, part}, {all, part}, {all, all},
                                                 {part, all},  {none, none}, {part, part}, {all, none}, {all, all}};
  testing::run_ranks(2, [&](World& world) {
    OutOfOrder net, alone;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = 2});
    GradientReducer reducer(flat, world.data(), world.control());
    const auto backward = [](OutOfOrder& of, Part used, int64_t rank) {
      const at::Tensor x = torch::full({2, 64}, 1.0 + static_cast<double>(rank));
      if (used == part) of.body_2->forward(x).square().sum().backward();
      if (used == all) of.loss(x).backward();
    };
    for (const auto& [first, second] : steps) {
      net.zero_grad();
      reducer.begin();
      backward(net, world.rank() == 0 ? first : second, world.rank());
      std::vector<double> extra;
      reducer.finish(extra);
      alone.zero_grad();
      backward(alone, first, 0);
      backward(alone, second, 1);
      for (const auto& item : alone.named_parameters()) {
        const at::Tensor found = net.named_parameters()[item.key()].grad(), expected = item.value().grad();
        ASSERT_EQ(found.defined(), expected.defined()) << item.key();
        if (expected.defined()) {
          EXPECT_TRUE(torch::allclose(found, expected)) << item.key();
        }
      }
    }
  });
}

// Ranks route their samples to other experts in every step, to some of them rarely, so that each rank fills other
// buckets. With sums in shards, and in further micro-batches, a rank waits in backward for the memory of its oldest
// bucket until that is reduced: forever if another rank did not send the bucket.
TEST(GradientReducer, SumsOfExpertsThatRanksUseByChance) {
  struct Experts : torch::nn::Module {
    std::vector<torch::nn::Linear> experts;
    Experts() {
      for (int i = 0; i < 8; ++i) {
        experts.push_back(register_module("expert_" + std::to_string(i), torch::nn::Linear(7, 7)));
      }
    }
    at::Tensor loss(const at::Tensor& x, const std::vector<bool>& used) {
      at::Tensor sum = torch::zeros({});
      for (size_t i = 0; i < experts.size(); ++i) {
        if (used[i]) sum = sum + experts[i]->forward(x).square().sum();
      }
      return sum;
    }
  };
  constexpr int64_t kRanks = 3;
  for (const bool shard : {false, true}) {
    testing::run_ranks(kRanks, [&](World& world) {
      Experts net, alone;
      for (const auto& item : net.named_parameters()) {
        alone.named_parameters()[item.key()].set_data(item.value().detach().fill_(0.5).clone());
      }
      const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
      const FlatParameters flat(net, optimizers,
                                {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = kRanks});
      ReduceOptions options;
      const auto own = [&](size_t b) {
        return rank_range(flat.buckets()[b].flat.numel(), shard ? world.rank() : 0, shard ? kRanks : 1);
      };
      options.shard = shard;
      options.make_sums = [&](size_t b) { return std::vector{own(b).of(at::zeros_like(flat.buckets()[b].flat))}; };
      GradientReducer reducer(flat, world.data(), world.control(), options);
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(11);  // the same on every rank
      for (int step = 0; step < 30; ++step) {
        const at::Tensor chance = torch::rand({kRanks, 8}, generator);
        const auto used_by = [&](int64_t rank) {
          std::vector<bool> used;
          for (int64_t i = 0; i < 8; ++i) used.push_back(chance[rank][i].item<float>() < 0.05F * static_cast<float>(i));
          return used;
        };
        const auto backward = [&](Experts& of, int64_t rank) {
          const at::Tensor loss = of.loss(torch::full({2, 7}, 1.0 + static_cast<double>(rank)), used_by(rank));
          if (loss.requires_grad()) loss.backward();
        };
        if (step % 3 == 0) {
          reducer.sums().clear();
          alone.zero_grad();
        }
        reducer.begin();
        backward(net, world.rank());
        std::vector<double> extra;
        reducer.finish(extra);
        for (int64_t rank = 0; rank < kRanks; ++rank) backward(alone, rank);
        for (size_t b = 0; b < flat.buckets().size(); ++b) {
          const auto& slots = flat.buckets()[b].slots;
          at::Tensor expected = at::zeros_like(flat.buckets()[b].flat);
          for (size_t s = 0; s < slots.size(); ++s) {
            const at::Tensor grad = alone.named_parameters()[slots[s].name].grad();
            if (grad.defined()) expected.narrow(0, slots[s].begin, slots[s].num_elements).copy_(grad.flatten());
            ASSERT_EQ(grad.defined(), reducer.sums().used(b)[s] > 0) << slots[s].name;
          }
          EXPECT_TRUE(torch::allclose(reducer.sums().of(b).front(), own(b).of(expected))) << b << " in step " << step;
        }
      }
    });
  }
}

// So many ranks that the marks of a few parameters do not go with every message.
class NotesLengths final : public testing::OthersHaveTheSame {
 public:
  explicit NotesLengths(std::vector<int64_t>& lengths) : OthersHaveTheSame(1 << 20), lengths_(lengths) {}
  Work all_reduce(at::Tensor flat, ReduceOp) override {
    lengths_.push_back(flat.numel());
    return {};
  }

 private:
  std::vector<int64_t>& lengths_;
};

TEST(GradientReducer, ManyRanksTellWhichParametersTheyUsedOnlyWhenThatHasChanged) {
  OutOfOrder net;
  World alone;
  std::vector<int64_t> lengths;
  NotesLengths control(lengths);
  const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
  const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64});
  ReduceOptions options;
  options.make_sums = [&](size_t b) { return std::vector{at::zeros_like(flat.buckets()[b].flat)}; };
  GradientReducer reducer(flat, alone.data(), control, options);
  const auto reduce = [&] {
    lengths.clear();
    reducer.sums().clear();
    reducer.begin();
    net.loss(torch::ones({2, 64})).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    std::vector<double> used;
    for (size_t b = 0; b < flat.buckets().size(); ++b) used.push_back(reducer.sums().used(b).front());
    return used;
  };
  EXPECT_THAT(reduce(), ElementsAre(1, 1, 1));
  EXPECT_THAT(lengths, ElementsAre(2, 3));
  EXPECT_THAT(reduce(), ElementsAre(1, 1, 1));
  EXPECT_THAT(lengths, ElementsAre(2));
  net.stem->weight.requires_grad_(false);  // registered last, so in the first bucket
  EXPECT_THAT(reduce(), ElementsAre(0, 1, 1));
  EXPECT_THAT(lengths, ElementsAre(2, 3));
  EXPECT_THAT(reduce(), ElementsAre(0, 1, 1));
  EXPECT_THAT(lengths, ElementsAre(2));
}

// Buckets of two ranks; `control` tells which gradients ranks have.
struct OutOfOrderOnTwoRanks {
  explicit OutOfOrderOnTwoRanks(ReduceOptions options = {})
      : flat(net, optimizers, {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = 1}),
        reducer(flat, data, control, options) {}

  // Returns what was sent, and where backward ended.
  const std::vector<std::string>& reduce() {
    events.clear();
    net.zero_grad();
    reducer.begin();
    net.loss(torch::ones({2, 64})).backward();
    events.emplace_back("backward ends");
    std::vector<double> extra;
    reducer.finish(extra);
    return events;
  }

  OutOfOrder net;
  std::vector<std::string> events;
  NotesSending data{events, 2};
  testing::OthersHaveTheSame control{2};
  Optimizers optimizers{two_optimizers(net)};  // so that the message is not sent with a bucket
  FlatParameters flat;
  GradientReducer reducer;

 private:
  static Optimizers two_optimizers(const OutOfOrder& net) {
    Optimizers made(optim::SGD(net.body_1->parameters(), {.lr = 1.0}));
    made.add(optim::SGD({net.body_2->weight, net.stem->weight}, {.lr = 1.0}));
    return made;
  }
};

// If ranks may differ in what they have frozen, the next order is learnt from rank 0's backward.
TEST(GradientReducer, AFrozenBucketKeepsOthersWaitingInOneBackwardOnly) {
  OutOfOrderOnTwoRanks ranks;
  ranks.reduce();
  EXPECT_THAT(ranks.reduce(),
              ElementsAre("all_reduce of 192", "all_reduce of 128", "all_reduce of 64", "backward ends"));
  ranks.net.body_2->weight.set_requires_grad(false);
  EXPECT_THAT(ranks.reduce(), ElementsAre("backward ends", "all_reduce of 128", "all_reduce of 64"));
  EXPECT_THAT(ranks.reduce(), ElementsAre("all_reduce of 128", "all_reduce of 64", "backward ends"));
  ranks.net.body_2->weight.set_requires_grad(true);
  EXPECT_THAT(ranks.reduce(),
              ElementsAre("all_reduce of 128", "all_reduce of 64", "all_reduce of 192", "backward ends"));
  EXPECT_THAT(ranks.reduce(),
              ElementsAre("all_reduce of 192", "all_reduce of 128", "all_reduce of 64", "backward ends"));
}

// As in manual optimisation, where optimizers are toggled in every step.
TEST(GradientReducer, WhereRanksFreezeAlikeAFrozenBucketKeepsNoneWaiting) {
  OutOfOrderOnTwoRanks ranks({.learns_order = false});
  EXPECT_THAT(ranks.reduce(),
              ElementsAre("all_reduce of 64", "all_reduce of 192", "all_reduce of 128", "backward ends"));
  ranks.net.stem->weight.set_requires_grad(false);
  EXPECT_THAT(ranks.reduce(), ElementsAre("all_reduce of 192", "all_reduce of 128", "backward ends"));
  ranks.net.stem->weight.set_requires_grad(true);
  EXPECT_THAT(ranks.reduce(),
              ElementsAre("all_reduce of 64", "all_reduce of 192", "all_reduce of 128", "backward ends"));
}

TEST(GradientReducer, RefusesAGradientOfAParameterThatWasFrozenAfterTheForward) {
  OutOfOrderOnTwoRanks ranks;
  ranks.reducer.begin();
  const at::Tensor loss = ranks.net.loss(torch::ones({2, 64}));
  ranks.net.stem->weight.set_requires_grad(false);
  ranks.reducer.begin();
  EXPECT_THAT(testing::message_of<c10::Error>([&] { loss.backward(); }),
              ::testing::HasSubstr("'stem.weight' was frozen between the forward and the backward"));
}

TEST(GradientReducer, ReducesBucketsThatWereAppended) {
  run_ranks(2, [](World& world) {
    OutOfOrder net, alone;
    net.body_2->weight.set_requires_grad(false);
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const BucketOptions buckets{.world_size = world.world_size()};
    FlatParameters flat(net, optimizers, buckets);
    GradientReducer reducer(flat, world.data(), world.control(), {});
    const auto reduce = [&] {
      net.zero_grad();
      reducer.begin();
      net.loss(torch::full({2, 64}, static_cast<double>(world.rank() + 1))).backward();
      std::vector<double> extra{1};
      reducer.finish(extra);
      EXPECT_EQ(extra[0], 2);
    };
    reduce();
    net.body_2->weight.set_requires_grad(true);
    flat.append(net, optimizers, buckets);
    reducer.append();
    reduce();
    for (const double scale : {1.0, 2.0}) alone.loss(torch::full({2, 64}, scale)).backward();
    for (size_t i = 0; i < net.parameters().size(); ++i) {
      EXPECT_TRUE(torch::allclose(net.parameters()[i].grad(), alone.parameters()[i].grad(), 1e-5, 1e-5)) << i;
    }
  });
}

TEST(GradientReducer, RanksLaunchInTheOrderOfRank0) {
  run_ranks(2, [](World& world) {
    OutOfOrder net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers,
                              {.first_bucket_bytes = 64, .bucket_cap_bytes = 64, .world_size = world.world_size()});
    GradientReducer reducer(flat, world.data(), world.control(), {});
    const auto reduce = [&](double scale) {
      net.zero_grad();
      reducer.begin();
      // Backward of rank 1 reaches the layers in the order of their registration.
      const at::Tensor x = torch::full({2, 64}, scale);
      const at::Tensor loss =
          world.rank() == 0
              ? net.loss(x)
              : (net.stem->forward(x).sum() + net.body_2->forward(x).sum() + net.body_1->forward(x).sum());
      loss.backward();
      std::vector<double> extra;
      reducer.finish(extra);
    };
    for (const double scale : {1.0, 2.0, 3.0}) {
      reduce(scale);
      OutOfOrder alone;
      const at::Tensor x = torch::full({2, 64}, scale);
      alone.loss(x).backward();
      (alone.stem->forward(x).sum() + alone.body_2->forward(x).sum() + alone.body_1->forward(x).sum()).backward();
      for (size_t i = 0; i < net.parameters().size(); ++i) {
        EXPECT_TRUE(torch::allclose(net.parameters()[i].grad(), alone.parameters()[i].grad(), 1e-5, 1e-5)) << i;
      }
    }
  });
}

TEST(MoveInto, GivesTheSameTogetherAsOneByOne) {
  Net net;
  net.to(at::kDouble);
  const FlatParameters flat(net, Optimizers(optim::SGD(net.parameters(), {.lr = 1.0})));
  const FlatParameters::Bucket& bucket = flat.buckets().front();
  for (const bool adds : {false, true}) {
    std::vector<at::Tensor> filled;
    for (const bool together : {false, true}) {
      filled.push_back(torch::ones_like(bucket.flat));
      std::vector<at::Tensor> arrived;
      for (const auto& slot : bucket.slots) {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(arrived.size()));
        arrived.push_back(torch::rand(slot.param.sizes(), generator, bucket.flat.options()));
      }
      arrived[1].reset();  // a parameter without a gradient
      move_into(filled.back(), bucket, arrived, adds, together);
      for (const at::Tensor& grad : arrived) EXPECT_FALSE(grad.defined());
    }
    EXPECT_TRUE(filled[0].equal(filled[1])) << adds;
    EXPECT_GT(filled[0].sum().item<double>(), static_cast<double>(adds ? filled[0].numel() : 0));
  }
}

TEST(GradientReducer, GivesHooksBack) {
  struct Counting : torch::autograd::PostAccumulateGradHook {
    int& calls;
    explicit Counting(int& counter) : calls(counter) {}
    void operator()(const torch::autograd::Variable&) override { ++calls; }
  };
  int calls = 0;
  Net net;
  const at::Tensor weight = net.last->weight;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Counting>(calls));
  World alone;
  const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
  const FlatParameters flat(net, optimizers);
  {
    GradientReducer reducer(flat, alone.data(), alone.control());
    reducer.begin();
    net.loss(input_of(0, 0), true).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    EXPECT_EQ(calls, 1);
  }
  net.loss(input_of(0, 0), true).backward();
  EXPECT_EQ(calls, 2);
}

TEST(GradientReducer, RefusesASecondGradientOfTheSameStep) {
  Net net;
  World alone;
  const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
  const FlatParameters flat(net, optimizers);
  GradientReducer reducer(flat, alone.data(), alone.control());
  reducer.begin();
  const at::Tensor loss = net.loss(input_of(0, 0), true);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace
}  // namespace fulgur
