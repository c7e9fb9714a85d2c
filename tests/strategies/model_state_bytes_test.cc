// The bytes of a model that each rank keeps, counted on rank 0; the other ranks do not exist.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/core/make_module.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lamb.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/optim/torch_optimizer.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/estimate_memory.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/strategies/strategy_choice.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/others_have_the_same.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using ::testing::Throws;

constexpr int64_t kWidth = 512;
constexpr int64_t kLayers = 16;  // each has a quarter of a million parameters

struct Mlp : Module {
  torch::nn::Sequential layers;
  const std::string optimizer;
  const bool head_first;  // true: the layer that was registered first is the last of forward
  explicit Mlp(std::string its_optimizer, bool its_head_first = false)
      : optimizer(std::move(its_optimizer)), head_first(its_head_first) {
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    at::Tensor x = batch["x"];
    for (int64_t i = 0; i < kLayers; ++i) {
      x = layers[static_cast<size_t>(head_first ? (i + 1) % kLayers : i)]->as<torch::nn::Linear>()->forward(x);
    }
    return x.to(at::kFloat).square().mean();
  }
  // Both halves of the layers, or biases and weights.
  std::vector<ParamGroup> two_groups() const {
    std::vector<ParamGroup> groups(2);
    const auto params = parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      const bool is_second = optimizer.starts_with("biases") ? params[i].dim() == 2 : i >= params.size() / 2;
      groups[is_second ? 1 : 0].params.push_back(params[i]);
    }
    if (optimizer.ends_with("swapped")) std::swap(groups[0], groups[1]);
    return groups;
  }
  Optimizers configure_optimizers() override {
    if (optimizer.starts_with("halves") || optimizer.starts_with("biases")) {
      return optim::AdamW(two_groups(), {.lr = 1e-3});
    }
    if (optimizer == "SGD") return optim::SGD(parameters(), {.lr = 1e-3});
    if (optimizer == "momentum") return optim::SGD(parameters(), {.lr = 1e-3, .momentum = 0.9});
    if (optimizer == "LAMB") return optim::LAMB(parameters(), {.lr = 1e-3});
    return optim::AdamW(parameters(), {.lr = 1e-3});
  }
};

struct Plan {
  StrategyChoice strategy;
  int64_t num_devices = 1;
  std::string precision = "32";
  std::string optimizer = "AdamW";
  bool head_first = false;
  int64_t micro_batches = 1;
};

struct Bytes {
  int64_t steady;  // bytes that stay from step to step, or between micro-batches if these are more
  ModelMemory estimated;
  double model_state;  // steady bytes per parameter, without the buckets
  double buckets;      // bytes per parameter
  double peak;         // bytes above `steady`, in units of a layer
  double evaluated;  // bytes per parameter that are added while validation sees the parameters without what is expected
};

// With this size a layer is a bucket.
double bucket_mib(const std::string& precision) { return precision == "32" ? 1.5 : 0.75; }

Bytes bytes_of(const Plan& plan) {
  testing::CountingAllocator memory;
  const int64_t before = memory.live();
  const auto module = make_module<Mlp>(plan.optimizer, plan.head_first);
  const int64_t model = memory.live() - before;
  int64_t num_params = 0;
  for (const at::Tensor& param : module->parameters()) num_params += param.numel();
  const ModelMemory estimated = estimate_memory(*module, plan.strategy, plan.num_devices, plan.precision,
                                                module->configure_optimizers(), c10::kCPU, plan.micro_batches);
  EXPECT_EQ(memory.live() - before, model);
  const bool in_one_process = canonical_name(plan.strategy.name()) == "dp";
  const auto group = std::make_shared<testing::OthersHaveTheSame>(in_one_process ? 1 : plan.num_devices);
  World world(group, group);
  const auto strategy = plan.strategy.make("auto");
  strategy->setup(*module, {.devices = std::vector<c10::Device>(in_one_process ? plan.num_devices : 1, c10::kCPU),
                            .precision = Precision(plan.precision),
                            .world = world,
                            .accumulates = plan.micro_batches > 1});
  strategy->setup_optimizers(module->configure_optimizers());
  int64_t in_window = 0;
  const auto step = [&] {
    AccumulationWindow all;
    for (int64_t i = 0; i < plan.micro_batches; ++i) {
      const bool is_last = i + 1 == plan.micro_batches;
      const Batch batch = strategy->to_device({{"x", torch::ones({2, kWidth})}});
      at::Tensor loss = strategy->training_step(batch, i);
      if (i == 0) strategy->zero_grad(0);
      strategy->backward(loss, is_last);
      all = strategy->end_micro_batch({.micro_batches = i + 1}, is_last);
      loss.reset();
      if (!is_last) in_window = std::max(in_window, memory.live() - before);
    }
    strategy->optimizer_step(0, {.micro_batches = all.micro_batches});
  };
  for (int i = 0; i < 2; ++i) step();  // delayed updates allocate their memory in the second step
  const int64_t while_hidden = memory.live();
  strategy->show_evaluated(true);
  const auto evaluated = static_cast<double>(memory.live() - while_hidden);
  strategy->show_evaluated(false);
  strategy->drain();
  memory.reset_peak();
  const int64_t between_steps = memory.live() - before;
  for (int i = 0; i < 2; ++i) step();
  strategy->drain();  // waits for the update that runs in the background
  const int64_t steady = std::max(between_steps, in_window);
  const double layer = (kWidth * kWidth + kWidth) * (plan.precision == "32" ? 4.0 : 2.0);
  const double pool = canonical_name(plan.strategy.name()) == "ddp_sharded" && plan.num_devices > 1 ? 2.0 * layer : 0.0;
  const auto n = static_cast<double>(num_params);
  const Bytes bytes{steady,
                    estimated,
                    (static_cast<double>(steady) - pool) / n,
                    pool / n,
                    static_cast<double>(memory.peak() - before - steady) / layer,
                    evaluated / n};
  strategy->teardown();
  return bytes;
}

struct Row {
  std::string precision;
  int64_t world_size;
  double expected;  // bytes per parameter: reference values of ZeRO stage 2
};

class ModelState : public ::testing::TestWithParam<Row> {};

TEST_P(ModelState, OfDdpShardedIsThatOfTheFormula) {
  const DdpSharded sharded{.ranks = {.bucket_cap_mib = bucket_mib(GetParam().precision), .first_bucket_mib = 0}};
  const Bytes bytes =
      bytes_of({.strategy = sharded, .num_devices = GetParam().world_size, .precision = GetParam().precision});
  EXPECT_NEAR(bytes.model_state, GetParam().expected, 0.03 * GetParam().expected);
  EXPECT_LE(bytes.peak, 3.1);  // in layers: two buckets and a gradient, with what forward keeps
  RecordProperty("bytes_per_parameter", std::to_string(bytes.model_state));
}

INSTANTIATE_TEST_SUITE_P(, ModelState,
                         ::testing::Values(Row{"32", 2, 10}, Row{"32", 4, 7}, Row{"32", 8, 5.5}, Row{"bf16-true", 2, 9},
                                           Row{"bf16-true", 4, 5.5}, Row{"bf16-true", 8, 3.75}),
                         [](const auto& test) {
                           return (test.param.precision == "32" ? "Fp32On" : "Bf16On") +
                                  std::to_string(test.param.world_size);
                         });

// The order of groups does not matter, nor where in the module a layer is registered.
TEST(ModelStateInAnyOrder, OfDdpShardedIsThatOfTheFormula) {
  const DdpSharded sharded{.ranks = {.bucket_cap_mib = bucket_mib("32"), .first_bucket_mib = 0}};
  for (const auto& [groups, head_first] :
       {std::pair("halves", false), std::pair("halves, swapped", false), std::pair("biases", false),
        std::pair("biases, swapped", false), std::pair("AdamW", true), std::pair("halves, swapped", true)}) {
    const Bytes bytes =
        bytes_of({.strategy = sharded, .num_devices = 4, .optimizer = groups, .head_first = head_first});
    // A weight whose bias is in another group is a bucket by itself, which takes nothing from the pool.
    const double pool = std::string_view(groups).starts_with("biases") ? 0 : bytes.buckets;
    EXPECT_NEAR(bytes.model_state + bytes.buckets - pool, 7, 0.03 * 7) << groups << head_first;
    EXPECT_LE(bytes.peak, 3.1) << groups << head_first;
  }
}

TEST(ModelStateOfDdp, IsSixteenBytes) {
  const Bytes bytes =
      bytes_of({.strategy = Ddp{.bucket_cap_mib = bucket_mib("32"), .first_bucket_mib = 0}, .num_devices = 2});
  EXPECT_NEAR(bytes.model_state, 16, 0.03 * 16);
}

TEST(ModelStateOfOneDevice, IsSixteenBytes) {
  const Bytes bytes = bytes_of({.strategy = SingleDevice()});
  EXPECT_NEAR(bytes.model_state, 16, 0.03 * 16);  // the gradients stay until the next zero_grad
}

// Forward's parameters stay beside those that validation sees, each on every rank that updates it.
TEST(ModelStateInValidation, OfDelayedUpdateHasACopyOfTheParameters) {
  EXPECT_EQ(bytes_of({.strategy = "zero_offload"}).evaluated, 0);
  EXPECT_EQ(bytes_of({.strategy = "ddp_sharded", .num_devices = 2}).evaluated, 0);
  for (const auto& [base, precision, num_devices, expected] :
       {std::tuple("zero_offload", "32", 1, 4.0), std::tuple("zero_offload", "bf16-true", 1, 2.0),
        std::tuple("zero_offload", "bf16-true", 2, 1.0), std::tuple("ddp_sharded", "32", 2, 2.0),
        std::tuple("single_device", "32", 1, 4.0), std::tuple("ddp", "32", 2, 4.0),
        std::tuple("ddp", "bf16-true", 2, 2.0)}) {
    const Bytes bytes = bytes_of({.strategy = DelayedUpdate{.base = base, .warmup_steps = 0},
                                  .num_devices = num_devices,
                                  .precision = precision});
    EXPECT_NEAR(bytes.evaluated, expected, 0.03 * expected) << base << ", " << precision << ", " << num_devices;
  }
}

TEST(ModelStateOfDelayedUpdate, APredictionAddsNoBytesInTraining) {
  for (const auto& [base, num_devices] :
       {std::pair("single_device", 1), std::pair("zero_offload", 1), std::pair("zero_offload", 2), std::pair("ddp", 2),
        std::pair("ddp_sharded", 2)}) {
    for (const char* precision : {"32", "bf16-true"}) {
      for (const int64_t micro_batches : {1, 3}) {
        SCOPED_TRACE(std::string(base) + ", " + precision + ", " + std::to_string(micro_batches) + " micro-batches");
        const auto bytes = [&](const char* predict) {
          return bytes_of({.strategy = DelayedUpdate{.base = base, .predict = predict, .warmup_steps = 0},
                           .num_devices = num_devices,
                           .precision = precision,
                           .micro_batches = micro_batches});
        };
        const Bytes without = bytes("none");
        for (const char* predict : {"gradient", "moments", "repeat"}) {
          const Bytes with = bytes(predict);
          EXPECT_EQ(with.steady, without.steady) << predict;
          // In layers, of which a copy of the parameters would take 16. When workers are done differs by one.
          EXPECT_LE(with.peak, without.peak + 1.5) << predict;
        }
      }
    }
  }
}

// The Trainer keeps its strategy, for another fit.
TEST(Teardown, LeavesNoStateBehind) {
  testing::CountingAllocator memory;
  const auto module = make_module<Mlp>("AdamW");
  const int64_t before = memory.live();
  World alone;
  const auto strategy = StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0}).make("auto");
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = alone});
  strategy->setup_optimizers(module->configure_optimizers());
  const auto step = [&] {
    const at::Tensor loss = strategy->training_step({{"x", torch::ones({2, kWidth})}}, 0);
    strategy->zero_grad(0);
    strategy->backward(loss, /*is_last=*/true);
    strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
    strategy->optimizer_step(0, {});
  };
  step();
  step();
  EXPECT_GT(memory.live() - before, int64_t{8} * kWidth * kWidth);  // state, 8 bytes per element
  strategy->teardown();
  EXPECT_NEAR(static_cast<double>(memory.live() - before), 0, 1 << 16);
}

class EstimatedMemory : public ::testing::TestWithParam<Plan> {};

TEST_P(EstimatedMemory, IsWhatStaysAllocated) {
  const Bytes bytes = bytes_of(GetParam());
  const auto steady = static_cast<double>(bytes.steady);
  const auto on_device = static_cast<double>(bytes.estimated.total() - bytes.estimated.on_host);
  EXPECT_NEAR(on_device, steady, 0.03 * steady);  // an arena on the host is not counted
  EXPECT_TRUE(bytes.estimated.optimizer_state.has_value());
}

INSTANTIATE_TEST_SUITE_P(
    , EstimatedMemory,
    ::testing::Values(Plan{"single_device"}, Plan{"single_device", 1, "64"}, Plan{"single_device", 1, "bf16-mixed"},
                      Plan{"single_device", 1, "bf16-true"}, Plan{"single_device", 1, "32", "SGD"},
                      Plan{"single_device", 1, "32", "momentum"}, Plan{"single_device", 1, "32", "LAMB"}, Plan{"dp", 2},
                      Plan{"dp", 3}, Plan{"ddp", 2}, Plan{"ddp", 4, "bf16-true"}, Plan{"ddp_sharded", 1},
                      Plan{"ddp_sharded", 2}, Plan{"ddp_sharded", 3}, Plan{"ddp_sharded", 8, "bf16-true"},
                      Plan{"ddp_sharded", 4, "bf16-mixed"}, Plan{"ddp_sharded", 4, "32", "SGD"},
                      Plan{"ddp_sharded", 8, "64", "momentum"}, Plan{"zero_offload"}, Plan{"zero_offload", 4},
                      Plan{"zero_offload", 1, "bf16-true"}, Plan{ZeroOffload{.host = {.ratio = 0.5}}, 2},
                      Plan{ZeroOffload{.host = {.ratio = 0}}, 2}, Plan{DelayedUpdate{.warmup_steps = 0}},
                      Plan{DelayedUpdate{.warmup_steps = 0}, 2, "bf16-true"},
                      Plan{DelayedUpdate{.base = "ddp", .warmup_steps = 0}, 2},
                      Plan{DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0}, 2},
                      Plan{DdpSharded{.ranks = {.bucket_cap_mib = 0.2, .first_bucket_mib = 0}}, 4},
                      Plan{DdpSharded{.shard_group = "2"}, 4}, Plan{DdpSharded{.shard_group = "2"}, 8, "bf16-true"},
                      Plan{ZeroOffload{.host = {.ratio = 0.5}, .shard_group = "4"}, 8},
                      Plan{DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0, .shard_group = "2"}, 4}));

// What travels as bf16 has memory of its own, of half the size.
INSTANTIATE_TEST_SUITE_P(
    WhereGradientsTravelAsBf16, EstimatedMemory,
    ::testing::Values(Plan{Ddp{.wire = "bf16"}, 2}, Plan{Ddp{.wire = "bf16"}, 1},
                      Plan{DdpSharded{.ranks = {.wire = "bf16"}}, 4}, Plan{ZeroOffload{.ranks = {.wire = "bf16"}}, 2},
                      Plan{DelayedUpdate{.base = "ddp", .warmup_steps = 0, .ranks = {.wire = "bf16"}}, 2},
                      Plan{.strategy = Ddp{.wire = "bf16"}, .num_devices = 2, .micro_batches = 3},
                      Plan{.strategy = DdpSharded{.ranks = {.wire = "bf16"}}, .num_devices = 4, .micro_batches = 3}));

// In groups each rank keeps what it would keep in a run of one group; the parameters cost nothing else.
TEST(EstimatedMemoryOfGroups, IsThatOfAGroupAlone) {
  const auto module = make_module<Mlp>("AdamW");
  const Optimizers optimizers = module->configure_optimizers();
  const auto estimate = [&](const StrategyChoice& strategy, int64_t world_size, int64_t num_nodes) {
    return estimate_memory(*module, strategy, world_size, "32", optimizers, c10::kCPU, 1, num_nodes).total();
  };
  EXPECT_EQ(estimate(DdpSharded{.shard_group = "2"}, 8, 1), estimate("ddp_sharded", 2, 1));
  EXPECT_EQ(estimate(DdpSharded{.shard_group = "host"}, 8, 2), estimate("ddp_sharded", 4, 1));
  EXPECT_EQ(estimate(DdpSharded{.shard_group = "host"}, 8, 1), estimate("ddp_sharded", 8, 1));
  EXPECT_THAT([&] { estimate(DdpSharded{.shard_group = "3"}, 8, 1); }, Throws<UsageError>());
}

// Three micro-batches, so that sums of 16-bit gradients are fp32 before the last one.
INSTANTIATE_TEST_SUITE_P(
    WhereMicroBatchesAreAccumulated, EstimatedMemory,
    ::testing::Values(
        Plan{.strategy = "single_device", .micro_batches = 3},
        Plan{.strategy = "single_device", .precision = "bf16-true", .micro_batches = 3},
        Plan{.strategy = "dp", .num_devices = 2, .micro_batches = 3},
        Plan{.strategy = "ddp", .num_devices = 2, .micro_batches = 3},
        Plan{.strategy = "ddp", .num_devices = 2, .precision = "bf16-true", .micro_batches = 3},
        Plan{.strategy = "ddp_sharded", .num_devices = 4, .micro_batches = 3},
        Plan{.strategy = "ddp_sharded", .num_devices = 4, .precision = "bf16-true", .micro_batches = 3},
        Plan{.strategy = DdpSharded{.reduce = "at_boundary"}, .num_devices = 4, .micro_batches = 3},
        Plan{.strategy = DdpSharded{.reduce = "at_boundary", .ranks = {.bucket_cap_mib = 0.2, .first_bucket_mib = 0}},
             .num_devices = 4,
             .precision = "bf16-true",
             .micro_batches = 3},
        Plan{.strategy = DelayedUpdate{.base = "ddp_sharded", .warmup_steps = 0}, .num_devices = 2, .micro_batches = 3},
        Plan{.strategy = "zero_offload", .precision = "bf16-true", .micro_batches = 3},
        Plan{.strategy = "zero_offload", .num_devices = 2, .precision = "bf16-true", .micro_batches = 3},
        Plan{.strategy = DelayedUpdate{.warmup_steps = 0}, .precision = "bf16-true", .micro_batches = 3}));

TEST(OffloadedBytes, HoldSumsOfMicroBatchesInFp32) {
  for (const bool accumulates : {false, true}) {
    const auto module = make_module<Mlp>("AdamW");
    module->to(at::kBFloat16);
    const Optimizers optimizers = module->configure_optimizers();
    const FlatParameters flat(*module, optimizers);
    OptimizerShard shard(flat, optimizers, {.host_ratio = 1, .accumulates = accumulates});
    EXPECT_EQ(shard.make_sums(0).at(0).scalar_type(), accumulates ? at::kFloat : at::kBFloat16);
    EXPECT_EQ(
        shard.host_bytes(),
        estimate_memory(*module, "zero_offload", 1, "bf16-true", optimizers, c10::kCPU, accumulates ? 4 : 1).on_host);
  }
}

// A device keeps its parameters and its buckets; 16 bytes per parameter are on the host, 18 with delayed updates.
TEST(OffloadedBytes, AreThoseOfTheFormula) {
  for (const auto& [strategy, precision, num_devices, host] :
       {std::tuple("zero_offload", "bf16-true", 1, 16.0), std::tuple("delayed_update", "bf16-true", 1, 18.0),
        std::tuple("zero_offload", "32", 1, 16.0), std::tuple("zero_offload", "bf16-true", 2, 8.0)}) {
    const auto module = make_module<Mlp>("AdamW");
    const Optimizers optimizers = module->configure_optimizers();
    const ModelMemory memory = estimate_memory(*module, strategy, num_devices, precision, optimizers);
    double n = 0;
    for (const at::Tensor& param : module->parameters()) n += static_cast<double>(param.numel());
    EXPECT_NEAR(static_cast<double>(memory.on_host) / n, host, 0.03 * host) << strategy << precision << num_devices;
    const double device = static_cast<double>(memory.total() - memory.on_host - memory.buckets) / n;
    const double expected = std::string_view(precision) == "32" ? 4 : 2;
    EXPECT_NEAR(device, expected, 0.03 * expected) << strategy << precision << num_devices;
  }
}

TEST(OffloadedBytes, AreThoseOfTheArena) {
  for (const int64_t late : {0, 1}) {
    const auto module = make_module<Mlp>("AdamW");
    const Optimizers optimizers = module->configure_optimizers();
    const FlatParameters flat(*module, optimizers);
    const OptimizerShard shard(flat, optimizers, {.host_ratio = 1, .copies = late == 1, .gradient_sums = 1 + late});
    const StrategyChoice choice = late == 1 ? "delayed_update" : "zero_offload";
    EXPECT_EQ(shard.host_bytes(), estimate_memory(*module, choice, 1, "32", optimizers).on_host);
  }
}

// Gradients that are added on the host come from a GPU through pinned memory, of the largest bucket's size.
TEST(OffloadedBytes, HaveAStagingBufferWhereMicroBatchesAreAccumulated) {
  const auto module = make_module<Mlp>("AdamW");
  const Optimizers optimizers = module->configure_optimizers();
  const StrategyChoice strategy = ZeroOffload{.ranks = {.bucket_cap_mib = 1, .first_bucket_mib = 1}};
  const auto memory = [&](c10::DeviceType device, int64_t micro_batches) {
    return estimate_memory(*module, strategy, 1, "bf16-true", optimizers, device, micro_batches);
  };
  const auto staged = [&](int64_t micro_batches) {
    return memory(at::kCUDA, micro_batches).on_host - memory(at::kCPU, micro_batches).on_host;
  };
  const int64_t numbers = 16;  // by which padding differs, in bytes of the arena for each parameter
  const auto padding = static_cast<int64_t>(module->parameters().size()) * 256 * numbers;
  EXPECT_LE(staged(1), padding);
  EXPECT_GE(staged(4), 1 << 20);
  EXPECT_LE(staged(4), (1 << 20) + padding);
}

// WeightAveraging.KeepsFourBytesForEachParameterAmongAllRanks measures it.
TEST(EstimatedMemoryOfAnAverage, IsFourBytesForEachParameterAmongAllRanks) {
  for (const char* name : {"single_device", "ddp", "ddp_sharded", "zero_offload"}) {
    for (const char* precision : {"32", "bf16-true", "64"}) {
      SCOPED_TRACE(std::string(name) + ", " + precision);
      const auto module = make_module<Mlp>("AdamW");
      const Optimizers optimizers = module->configure_optimizers();
      int64_t num_params = 0;
      for (const at::Tensor& param : module->parameters()) num_params += param.numel();
      const int64_t num_devices = std::string_view(name) == "single_device" ? 1 : 4;
      const auto strategy = StrategyChoice(name).make("auto");
      const auto memory_of = [&](bool averages) {
        return *strategy->model_memory(
            *module, optimizers,
            {.precision = Precision(precision), .num_devices = num_devices, .averages_weights = averages});
      };
      const ModelMemory with = memory_of(true), without = memory_of(false);
      const double expected =
          static_cast<double>(num_params * (std::string_view(precision) == "64" ? 8 : 4) / num_devices);
      EXPECT_NEAR(static_cast<double>(with.total() - without.total()), expected, 0.01 * expected);
      EXPECT_NEAR(static_cast<double>(with.on_host - without.on_host),
                  std::string_view(name) == "zero_offload" ? expected : 0.0, 0.01 * expected);
    }
  }
}

TEST(EstimatedMemoryOfUnknown, IsSaid) {
  const Mlp module("AdamW");
  const Optimizers lbfgs = optim::TorchOptimizer(torch::optim::LBFGS(module.parameters()));
  EXPECT_FALSE(estimate_memory(module, "ddp", 2, "32", lbfgs).optimizer_state);
  EXPECT_THAT(estimate_memory_table(module, 2, "32", lbfgs), HasSubstr("unknown"));
  EXPECT_THAT([&] { estimate_memory(module, "dpp", 2, "32", lbfgs); }, Throws<UsageError>());
}

TEST(EstimatedMemoryTable, HasARowForEachStrategy) {
  const Mlp module("AdamW");
  const std::string table = estimate_memory_table(module, 8, "32", optim::AdamW(module.parameters(), {.lr = 1e-3}));
  for (const std::string& name : strategy_registry().names()) EXPECT_THAT(table, HasSubstr("\n" + name + " "));
}

TEST(FlatParametersMemory, IsOneBucketMoreThanTheModelWhileTheyAreMade) {
  testing::CountingAllocator memory;
  const auto module = make_module<Mlp>("AdamW");
  const Optimizers optimizers = module->configure_optimizers();
  const int64_t before = memory.live();
  memory.reset_peak();
  constexpr int64_t kBucketBytes = 3 << 20;
  const FlatParameters flat(*module, optimizers,
                            {.first_bucket_bytes = kBucketBytes, .bucket_cap_bytes = kBucketBytes});
  EXPECT_LE(memory.peak() - before, kBucketBytes + 4096);
  EXPECT_GT(memory.peak() - before, kBucketBytes / 2);  // the bucket was counted
  EXPECT_NEAR(static_cast<double>(memory.live() - before), 0, 4096);
}

}  // namespace
}  // namespace fulgur
