// State and updates on the host: the bits of the strategies that have them on the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "device/host_arena.h"
#include "optim/lamb.h"
#include "optim/lion.h"
#include "optim/sgd.h"
#include "strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using testing::Case;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Net;
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
    return {.ratio = GetParam().ratio,
            .update_threads = GetParam().update_threads,
            .bucket_cap_mib = GetParam().c.bucket_mib};
  }
};

template <class M>
void expect_equal(int64_t world_size, const Case& c, const StrategyChoice& expected, const StrategyChoice& got) {
  run_ranks(world_size, [&](World& world) {
    const at::Tensor a = train<M>(world, c, expected), b = train<M>(world, c, got);
    EXPECT_TRUE(b.equal(a)) << c.name << ": " << (b - a).abs().max().item<double>();
  });
}

// design.md, numerics, rule 2.
TEST_P(ZeroOffloadTest, EqualsSingleDeviceBitForBit) {
  expect_equal<Net<optim::AdamW>>(1, GetParam().c, "single_device", strategy());
  expect_equal<Net<optim::SGD>>(1, GetParam().c, "single_device", strategy());
  expect_equal<Net<optim::Lion>>(1, GetParam().c, "single_device", strategy());
}

TEST_P(ZeroOffloadTest, EqualsDdpShardedBitForBit) {
  for (const int64_t world_size : {2, 3}) {
    const DdpSharded sharded{.bucket_cap_mib = GetParam().c.bucket_mib};
    expect_equal<Net<optim::AdamW>>(world_size, GetParam().c, sharded, strategy());
  }
}

INSTANTIATE_TEST_SUITE_P(, ZeroOffloadTest,
                         ::testing::Values(Offload{"plain", {}}, Offload{"threads", {.clip = 0.05}, 1, 3},
                                           Offload{"accumulating", {.accumulate = 4, .clip = 0.05}},
                                           Offload{"smallBuckets", {.bucket_mib = 0.0001}, 1, 2},
                                           Offload{"bf16True", {.precision = "bf16-true"}},
                                           Offload{"bf16TrueAccumulating", {.accumulate = 2, .precision = "bf16-true"}},
                                           Offload{"bf16Mixed", {.precision = "bf16-mixed"}},
                                           Offload{"fp16Mixed", {.precision = "16-mixed"}},
                                           Offload{"fp64", {.precision = "64"}},
                                           Offload{"half", {.clip = 0.05}, 0.5, 2}, Offload{"none", {}, 0}),
                         [](const auto& test) { return test.param.name; });

TEST(ZeroOffload, AHookSeesAndChangesTheMeanGradients) {
  struct Halves : Net<optim::SGD> {
    void on_before_optimizer_step(Optimizer& optimizer) override {
      scale_gradients(optimizer.params(), torch::tensor(0.5, torch::kDouble));
    }
  };
  expect_equal<Halves>(1, {.accumulate = 2}, "single_device", ZeroOffload{.ratio = 0.5});
  expect_equal<Halves>(2, {}, "ddp_sharded", ZeroOffload{.ratio = 0.5});
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
  EXPECT_THAT(why_refused<TinyModule>(ZeroOffload{.ratio = 1.5}), HasSubstr("ratio"));
  EXPECT_THAT(why_refused<Lamb>("zero_offload"), HasSubstr("LAMB needs whole tensors"));
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
