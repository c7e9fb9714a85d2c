// What of a model each rank keeps, counted on rank 0 of ranks that are not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "core/make_module.h"
#include "optim/adam.h"
#include "strategies/flat_strategy.h"
#include "strategies/strategy_choice.h"
#include "tests/testing/counting_allocator.h"

namespace fulgur {
namespace {

constexpr int64_t kWidth = 512;
constexpr int64_t kLayers = 16;  // of a quarter of a million parameters

// Rank 0 of many: the others have what it has.
class OthersHaveTheSame final : public Collective {
 public:
  explicit OthersHaveTheSame(int64_t world_size) : world_size_(world_size) {}
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return world_size_; }
  Work all_reduce(at::Tensor, ReduceOp) override { return {}; }
  Work reduce_scatter(at::Tensor, ReduceOp) override { return {}; }
  Work all_gather(at::Tensor flat) override {
    const at::Tensor own = rank_range(flat.numel(), 0, world_size_).of(flat);
    for (int64_t rank = 1; rank < world_size_; ++rank) {
      const ElementRange range = rank_range(flat.numel(), rank, world_size_);
      range.of(flat).copy_(own.narrow(0, 0, range.size()));
    }
    return {};
  }
  Work broadcast(at::Tensor, int64_t) override { return {}; }
  void barrier() override {}
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>&) override { return nullptr; }

 private:
  int64_t world_size_;
};

struct Mlp : Module {
  torch::nn::Sequential layers;
  Mlp() {
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("layers", layers);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return layers->forward(batch["x"]).to(at::kFloat).square().mean();
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-3}); }
};

struct Bytes {
  double model_state;  // per parameter: what stays from step to step, but for the buckets
  double buckets;      // per parameter
  double peak;         // above what stays, in the largest bucket and gradient
};

// So that a layer is a bucket.
double bucket_mib(const std::string& precision) { return precision == "32" ? 1.5 : 0.75; }

Bytes bytes_of(const StrategyChoice& choice, int64_t world_size, const std::string& precision, bool pools) {
  testing::CountingAllocator memory;
  const int64_t before = memory.live();
  const auto module = make_module<Mlp>();
  int64_t num_params = 0;
  for (const at::Tensor& param : module->parameters()) num_params += param.numel();
  const auto group = std::make_shared<OthersHaveTheSame>(world_size);
  World world(group, group);
  const auto strategy = choice.make("auto");
  strategy->setup(*module, {.devices = {c10::kCPU}, .precision = Precision(precision), .world = world});
  strategy->setup_optimizers(module->configure_optimizers());
  const auto step = [&] {
    const Batch batch = strategy->to_device({{"x", torch::ones({1, kWidth})}});
    const at::Tensor loss = strategy->training_step(batch, 0);
    strategy->zero_grad(0);
    strategy->backward(loss, /*is_last=*/true);
    const Window all = strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
    strategy->optimizer_step(0, {.micro_batches = all.micro_batches});
  };
  step();
  memory.reset_peak();
  const int64_t steady = memory.live() - before;
  step();
  const double layer = (kWidth * kWidth + kWidth) * (precision == "32" ? 4.0 : 2.0);
  const double pool = pools ? 2.0 * layer : 0.0;
  const auto n = static_cast<double>(num_params);
  const Bytes bytes{(static_cast<double>(steady) - pool) / n, pool / n,
                    static_cast<double>(memory.peak() - before - steady) / layer};
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
  const DdpSharded sharded{.bucket_cap_mib = bucket_mib(GetParam().precision), .first_bucket_mib = 0};
  const Bytes bytes = bytes_of(sharded, GetParam().world_size, GetParam().precision, /*pools=*/true);
  EXPECT_NEAR(bytes.model_state, GetParam().expected, 0.03 * GetParam().expected);
  EXPECT_LE(bytes.peak, 3.1);  // of a layer: two buckets and a gradient, with what forward keeps
  RecordProperty("bytes_per_parameter", std::to_string(bytes.model_state));
}

INSTANTIATE_TEST_SUITE_P(, ModelState,
                         ::testing::Values(Row{"32", 2, 10}, Row{"32", 4, 7}, Row{"32", 8, 5.5}, Row{"bf16-true", 2, 9},
                                           Row{"bf16-true", 4, 5.5}, Row{"bf16-true", 8, 3.75}),
                         [](const auto& test) {
                           return (test.param.precision == "32" ? "Fp32On" : "Bf16On") +
                                  std::to_string(test.param.world_size);
                         });

TEST(ModelStateOfDdp, IsSixteenBytes) {
  const Bytes bytes =
      bytes_of(Ddp{.bucket_cap_mib = bucket_mib("32"), .first_bucket_mib = 0}, 2, "32", /*pools=*/false);
  EXPECT_NEAR(bytes.model_state, 16, 0.03 * 16);
}

TEST(ModelStateOfOneDevice, IsSixteenBytes) {
  const Bytes bytes = bytes_of(SingleDevice(), 1, "32", /*pools=*/false);
  EXPECT_NEAR(bytes.model_state, 16, 0.03 * 16);  // the gradients stay until the next zero_grad
}

TEST(FlatParametersMemory, IsOneBucketMoreThanTheModelWhileTheyAreMade) {
  testing::CountingAllocator memory;
  const auto module = make_module<Mlp>();
  const Optimizers optimizers = module->configure_optimizers();
  const int64_t before = memory.live();
  memory.reset_peak();
  constexpr int64_t kBucketBytes = 3 << 20;
  const FlatParameters flat(*module, optimizers,
                            {.first_bucket_bytes = kBucketBytes, .bucket_cap_bytes = kBucketBytes});
  EXPECT_LE(memory.peak() - before, kBucketBytes + 4096);
  EXPECT_GT(memory.peak() - before, kBucketBytes / 2);  // it was counted
  EXPECT_NEAR(static_cast<double>(memory.live() - before), 0, 4096);
}

}  // namespace
}  // namespace fulgur
