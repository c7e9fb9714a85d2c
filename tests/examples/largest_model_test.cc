// How much larger a language model may be when ddp_sharded trains it instead of ddp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/transformer_lm/language_model.h"
#include "fulgur.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/others_have_the_same.h"

namespace fulgur {
namespace {

constexpr int64_t kRanks = 8;

struct Use {
  int64_t num_params;
  int64_t peak;  // bytes of a step on one rank, including activations and buckets
};

Use use_of(const StrategyChoice& choice, int64_t n_layer) {
  testing::CountingAllocator memory;
  const int64_t before = memory.live();
  const auto module = make_module<transformer_lm::LanguageModel>(
      transformer_lm::LanguageModelOptions{.n_layer = n_layer, .n_embd = 256, .context = 16});
  Use use{};
  for (const at::Tensor& param : module->parameters()) use.num_params += param.numel();
  const auto group = std::make_shared<testing::OthersHaveTheSame>(kRanks);
  World world(group, group);
  const auto strategy = choice.make("auto");
  strategy->setup(*module, {.devices = {c10::kCPU}, .world = world});
  strategy->setup_optimizers(optim::AdamW(module->parameters(), {.lr = 1e-3}));
  const Batch batch{{"tokens", torch::randint(0, 256, {1, 17}, at::kByte)}};
  for (int step = 0; step < 2; ++step) {
    memory.reset_peak();
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(module->forward(batch["tokens"].narrow(1, 0, 16).to(at::kLong)).squeeze(0),
                                             batch["tokens"].narrow(1, 1, 16).to(at::kLong).squeeze(0));
    strategy->zero_grad(0);
    strategy->backward(loss, /*is_last=*/true);
    const AccumulationWindow all = strategy->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
    strategy->optimizer_step(0, {.micro_batches = all.micro_batches});
  }
  use.peak = memory.peak() - before;
  strategy->teardown();
  return use;
}

TEST(LargestModel, IsAlmostTwiceAsLargeOnEightRanks) {
  constexpr double kBucketMib = 1;
  const Use ddp = use_of(Ddp{.bucket_cap_mib = kBucketMib}, /*n_layer=*/10);
  const Use sharded = use_of(DdpSharded{.ranks = {.bucket_cap_mib = kBucketMib}}, /*n_layer=*/24);
  const double ratio = static_cast<double>(sharded.num_params) / static_cast<double>(ddp.num_params);
  RecordProperty("ratio", std::to_string(ratio));
  EXPECT_GE(ratio, 1.9);
  EXPECT_LE(sharded.peak, ddp.peak) << "at " << ratio << " times the parameters";
}

}  // namespace
}  // namespace fulgur
