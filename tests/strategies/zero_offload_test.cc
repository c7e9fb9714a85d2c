// State and updates on the host give the bits of the strategies that have them on the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fulgur/base/error.h"
#include "fulgur/device/host_arena.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/lion.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/presets.h"
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

struct Offload {
  std::string name{};
  Case c{};
  double ratio = 1;
  int64_t update_threads = 1;
};

class ZeroOffloadTest : public ::testing::TestWithParam<Offload> {
 protected:
  ZeroOffload strategy() const {
    return {.host = {.ratio = GetParam().ratio, .update_threads = GetParam().update_threads},
            .ranks = {.bucket_cap_mib = GetParam().c.bucket_mib}};
  }
};

template <class M>
void expect_equal(int64_t world_size, const Case& c, const StrategyChoice& expected, const StrategyChoice& got) {
  run_ranks(world_size, [&](World& world) {
    const at::Tensor a = train<M>(world, c, expected), b = train<M>(world, c, got);
    EXPECT_TRUE(b.equal(a)) << c.name << ": " << (b - a).abs().max().item<double>();
  });
}

// Where state lies, and where updates run, changes no bit.
TEST_P(ZeroOffloadTest, EqualsSingleDeviceBitForBit) {
  expect_equal<Net<optim::AdamW>>(1, GetParam().c, "single_device", strategy());
  expect_equal<Net<optim::SGD>>(1, GetParam().c, "single_device", strategy());
  expect_equal<Net<optim::Lion>>(1, GetParam().c, "single_device", strategy());
}

TEST_P(ZeroOffloadTest, EqualsDdpShardedBitForBit) {
  for (const int64_t world_size : {2, 3}) {
    const DdpSharded sharded{.ranks = {.bucket_cap_mib = GetParam().c.bucket_mib}};
    expect_equal<Net<optim::AdamW>>(world_size, GetParam().c, sharded, strategy());
  }
}

INSTANTIATE_TEST_SUITE_P(, ZeroOffloadTest,
                         ::testing::Values(Offload{"plain", {}},
                                           Offload{"clippedByValue", {.clip = 0.01, .clip_algorithm = "value"}, 0.5},
                                           Offload{"threads", {.clip = 0.05}, 1, 3},
                                           Offload{"accumulating", {.accumulate = 4, .clip = 0.05}},
                                           Offload{"smallBuckets", {.bucket_mib = 0.0001}, 1, 2},
                                           Offload{"bf16True", {.precision = "bf16-true"}},
                                           Offload{"bf16TrueAccumulating", {.accumulate = 2, .precision = "bf16-true"}},
                                           Offload{"bf16Mixed", {.precision = "bf16-mixed"}},
                                           Offload{"fp16Mixed", {.precision = "16-mixed"}},
                                           Offload{"fp64", {.precision = "64"}},
                                           Offload{"half", {.clip = 0.05}, 0.5, 2}, Offload{"none", {}, 0, 0}),
                         [](const auto& test) { return test.param.name; });

TEST(ZeroOffload, AHookChangesTheMeanGradients) {
  struct Halves : Net<optim::SGD> {
    void on_before_optimizer_step(Optimizer& optimizer) override {
      scale_gradients(optimizer.params(), torch::tensor(0.5, torch::kDouble));
    }
  };
  expect_equal<Halves>(1, {.accumulate = 2}, "single_device", ZeroOffload{.host = {.ratio = 0.5}});
  expect_equal<Halves>(2, {}, "ddp_sharded", ZeroOffload{.host = {.ratio = 0.5}});
}

TEST(ZeroOffload, AHookSeesGradientsOf32Bits) {
  struct Looks : Net<optim::SGD> {
    void on_before_optimizer_step(Optimizer& optimizer) override {
      int64_t num_gradients = 0;
      for (const at::Tensor& param : optimizer.params()) {
        if (!param.grad().defined()) continue;
        EXPECT_EQ(param.grad().scalar_type(), at::kFloat);
        ++num_gradients;
      }
      EXPECT_GT(num_gradients, 0);
    }
  };
  const Case c{.precision = "bf16-true"};
  expect_equal<Looks>(1, c, "single_device", "zero_offload");
  expect_equal<Looks>(2, c, "ddp_sharded", ZeroOffload{.host = {.ratio = 0.5}});
}

// beside_others shares a bucket with other parameters; empty has a bucket to itself, in which nothing is updated.
TEST(ZeroOffload, EmptyParametersAreLeftAlone) {
  struct WithEmpty : TinyModule {
    at::Tensor beside_others = register_parameter("beside_others", torch::zeros({0, 3}));
    at::Tensor empty = register_parameter("empty", torch::zeros({0}));
    WithEmpty() { testing::draw_weights(*this); }
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      return TinyModule::training_step(batch, batch_idx) + empty.sum() + beside_others.sum();
    }
    void on_before_optimizer_step(Optimizer& optimizer) override {
      scale_gradients(optimizer.params(), torch::tensor(0.5, torch::kDouble));
    }
    Optimizers configure_optimizers() override {
      return optim::SGD(
          std::vector<ParamGroup>{{.params = {hidden->weight, beside_others, hidden->bias, out->weight, out->bias}},
                                  {.params = {empty}}},
          {.lr = 0.1});
    }
  };
  expect_equal<WithEmpty>(1, {}, "single_device", "zero_offload");
  expect_equal<WithEmpty>(1, {}, "single_device", DelayedUpdate{.warmup_steps = 1000});
  expect_equal<WithEmpty>(2, {}, "ddp", "ddp_sharded");
  expect_equal<WithEmpty>(2, {}, DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0},
                          DelayedUpdate{.warmup_steps = 0});
}

struct Clamped : TinyModule {
  Clamped() { testing::draw_weights(*this); }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override {
    const c10::NoGradGuard no_grad;
    hidden->weight.clamp_(-0.1, 0.1);
  }
};

// Writes before the first step, after which there are copies of the parameters already.
struct ClampedFromTheStart : Clamped {
  void on_train_start() override {
    const c10::NoGradGuard no_grad;
    out->weight.fill_(0.25);
  }
};

TEST(ZeroOffload, WhatOthersWriteToParametersIsKept) {
  ::testing::internal::CaptureStderr();
  for (const double ratio : {1.0, 0.5}) {
    expect_equal<ClampedFromTheStart>(1, {}, "single_device", ZeroOffload{.host = {.ratio = ratio}});
    expect_equal<ClampedFromTheStart>(2, {}, "ddp_sharded", ZeroOffload{.host = {.ratio = ratio}});
    expect_equal<ClampedFromTheStart>(2, {}, "ddp_sharded", DelayedUpdate{.warmup_steps = 1000});
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("written to")));
}

struct ClampedAfterEpochs : TinyModule {
  void on_train_epoch_end() override {
    const c10::NoGradGuard no_grad;
    hidden->weight.clamp_(-0.1, 0.1);
  }
};

// Between epochs no update is in progress.
TEST(ZeroOffload, WhatIsWrittenBetweenLateUpdatesIsNotSaidToBeLost) {
  ::testing::internal::CaptureStderr();
  run_ranks(1, [&](World& world) {
    train<ClampedAfterEpochs>(world, {}, DelayedUpdate{.base = "single_device", .warmup_steps = 0});
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("written to")));
}

struct RegularisesUnused : testing::Net<optim::AdamW> {
  void on_before_optimizer_step(Optimizer&) override { unused->weight.mutable_grad() = 0.1 * unused->weight.detach(); }
};

// A bucket may have gradients of a hook alone.
TEST(ZeroOffload, AHookMayGiveAnUnusedParameterAGradient) {
  expect_equal<RegularisesUnused>(1, {.bucket_mib = 1e-4}, "single_device", "zero_offload");
  expect_equal<RegularisesUnused>(1, {.bucket_mib = 1e-4}, "single_device", DelayedUpdate{.warmup_steps = 1000});
}

std::string said_with(const StrategyChoice& strategy, const Case& c, int64_t world_size = 1) {
  ::testing::internal::CaptureStderr();
  run_ranks(world_size, [&](World& world) { train<Clamped>(world, c, strategy); });
  return ::testing::internal::GetCapturedStderr();
}

TEST(Masters, SayThatWhatOthersWriteToTheirRoundingsIsLost) {
  const Case c{.precision = "bf16-true"};
  const std::string lost = "parameter 'hidden.weight' was written to between steps; the new value is lost";
  const std::string said = said_with("single_device", c);
  EXPECT_THAT(said, HasSubstr(lost));
  EXPECT_EQ(said.find("written to"), said.rfind("written to"));  // warns once
  EXPECT_THAT(said_with("zero_offload", c), HasSubstr(lost));
  for (const char* strategy : {"ddp", "ddp_sharded", "zero_offload"})
    EXPECT_THAT(said_with(strategy, c, 2), HasSubstr(lost));
  EXPECT_THAT(said_with("single_device", {}), Not(HasSubstr("written to")));
  EXPECT_THAT(said_with(DelayedUpdate{.base = "single_device", .warmup_steps = 0}, {}), HasSubstr(lost));
}

template <class M>
std::string why_refused(const StrategyChoice& choice) {
  return message_of<UsageError>([&] {
    TrainerOptions options = testing::quiet({.strategy = choice});
    Trainer(options).fit(make_module<M>(), {.train = testing::tiny_loader()});
  });
}

TEST(ZeroOffload, BadInputIsRefused) {
  struct Lamb : TinyModule {
    Optimizers configure_optimizers() override { return optim::LAMB(parameters(), {.lr = 0.1}); }
  };
  EXPECT_THAT(why_refused<TinyModule>(ZeroOffload{.host = {.ratio = 1.5}}), HasSubstr("ratio"));
  EXPECT_THAT(why_refused<Lamb>("zero_offload"), HasSubstr("LAMB needs whole tensors"));
  EXPECT_THAT(why_refused<TinyModule>(ZeroOffload{.host = {.ratio = 0, .update_threads = 2}}),
              HasSubstr("strategy 'zero_offload': update_threads = 2 would have no effect with ratio = 0"));
}

TEST(HostArenaTest, RefusesMoreThanThereIs) {
  constexpr int64_t kTebibyte = int64_t{1} << 40;
  EXPECT_THAT(message_of<UsageError>([] { HostArena(512 * kTebibyte); }),
              HasSubstr("needs 524288.00 GiB of host memory, but "));
  EXPECT_GT(HostArena::available_bytes(), 0);
}

TEST(HostArenaTest, GivesAlignedZerosUntilItIsUsedUp) {
  HostArena arena(HostArena::bytes_for(3, at::kFloat) + HostArena::bytes_for(100, at::kBFloat16));
  const at::Tensor first = arena.take(3, at::kFloat), second = arena.take(100, at::kBFloat16);
  EXPECT_TRUE(first.eq(0).all().item<bool>());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second.data_ptr()) % 64, 0);
  EXPECT_THROW(arena.take(1, at::kFloat), c10::Error);
}

}  // namespace
}  // namespace fulgur
