// Every strategy of one process on a GPU, compared with the CPU.
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/seed.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/metrics/aggregation.h"
#include "fulgur/optim/adam.h"
#include "fulgur/strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::Net;

struct Training {
  StrategyChoice strategy = "single_device";
  std::string precision = "32";
  double clip = 0.0;
  int64_t accumulate = 1;
  bool cuda_graph = false;
};

at::Tensor weights_after(const Training& training, const char* accelerator) {
  const auto module = make_module<Net<optim::AdamW>>();
  TrainerOptions options = testing::quiet({.strategy = training.strategy,
                                           .max_epochs = 3,
                                           .precision = training.precision,
                                           .accumulate_grad_batches = training.accumulate,
                                           .gradient_clip_val = training.clip});
  options.accelerator = accelerator;
  options.devices = 1;
  Trainer(options).fit(
      module, {.train = DataLoader::make(testing::tiny_dataset(48), {.batch_size = 4, .shuffle = true, .seed = 3})});
  return testing::flat_weights(*module);
}

TEST(Gpu, WithoutOneTheErrorSaysWhatToWrite) {
  if (at::hasCUDA()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(testing::message_of<UsageError>([] { weights_after({}, "cuda"); }), HasSubstr("write 'cpu'"));
}

TEST(Gpu, EveryStrategyTrainsAsOnTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const std::vector<StrategyChoice> strategies{
      "single_device",
      "ddp",
      "ddp_sharded",
      "zero_offload",
      ZeroOffload{.host = {.ratio = 0.5}},
      DelayedUpdate{.warmup_steps = 0},
      DelayedUpdate{.base = "single_device", .warmup_steps = 0},
      DelayedUpdate{.base = "ddp_sharded", .predict = "repeat", .warmup_steps = 0}};
  for (const StrategyChoice& strategy : strategies) {
    for (const Training& training :
         {Training{strategy}, Training{strategy, "32", 0.05, 2}, Training{strategy, "bf16-true", 0.05, 2}}) {
      SCOPED_TRACE(c10::str(strategy.name(), " ", training.precision, " ", training.clip));
      const at::Tensor on_gpu = weights_after(training, "cuda"), on_cpu = weights_after(training, "cpu");
      const double tolerance = training.precision == "32" ? 1e-4 : 2e-2;
      EXPECT_LT(((on_gpu - on_cpu).norm() / on_cpu.norm()).item<double>(), tolerance);
    }
  }
}

constexpr int64_t kWidth = 1024;
constexpr int64_t kLayers = 16;  // each layer has 2 MiB in 16-bit precision

struct Deep : Module {
  torch::nn::Sequential layers;
  Deep() {
    for (int64_t i = 0; i < kLayers; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    register_module("layers", layers);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return layers->forward(batch["x"]).to(at::kFloat).square().mean();
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-3}); }
};

// The GPU holds the parameters, two buckets, the gradient that is being copied into one, and the temporaries of a step.
TEST(Gpu, ZeroOffloadKeepsTwoBytesAParameterAndAWindow) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  constexpr int64_t kLayerBytes = kWidth * kWidth * 2;
  c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(c10::kCUDA);
  for (const double clip : {0.0, 0.1}) {
    TrainerOptions options =
        testing::quiet({.strategy = ZeroOffload{.ranks = {.bucket_cap_mib = 2, .first_bucket_mib = 2}},
                        .max_steps = 3,
                        .precision = "bf16-true",
                        .gradient_clip_val = clip});
    options.accelerator = "cuda";
    options.devices = 1;
    const auto module = make_module<Deep>();
    const int64_t before = allocator.getDeviceStats(0).allocated_bytes[0].current;
    allocator.resetPeakStats(0);
    Trainer(options).fit(module, {.train = DataLoader::make(TensorDataset::make({{"x", torch::ones({12, kWidth})}}),
                                                            {.batch_size = 4})});
    const int64_t peak = allocator.getDeviceStats(0).allocated_bytes[0].peak - before;
    // cuBLAS has a workspace of its own, of some 32 MiB.
    EXPECT_LE(peak, (kLayers + 4) * kLayerBytes + (34 << 20)) << clip;
    RecordProperty(clip > 0 ? "peak_clipped" : "peak", std::to_string(peak));
  }
}

// Many small parameters in a bucket, sums of micro-batches on the host, in every way that a step may take.
TEST(Gpu, SumsOfMicroBatchesOnTheHostAreThoseOfTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const char* precision : {"32", "bf16-true"}) {
    for (const StrategyChoice& strategy :
         {StrategyChoice("zero_offload"), StrategyChoice(ZeroOffload{.host = {.ratio = 0.5}}),
          StrategyChoice(DelayedUpdate{.warmup_steps = 2})}) {
      SCOPED_TRACE(c10::str(strategy.name(), " ", precision));
      const Training training{strategy, precision, 0.0, 4};
      const at::Tensor on_gpu = weights_after(training, "cuda"), on_cpu = weights_after(training, "cpu");
      const double tolerance = std::string(precision) == "32" ? 1e-4 : 2e-2;
      EXPECT_LT(((on_gpu - on_cpu).norm() / on_cpu.norm()).item<double>(), tolerance);
    }
  }
}

// Parameters are published by the order of the stream: a host that is far ahead of the GPU changes nothing.
TEST(Gpu, AHostThatIsAheadPublishesTheSameParameters) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  struct Busy : Net<optim::AdamW> {
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (is_busy()) {
        at::Tensor product = torch::eye(2048, batch.begin()->second.device());
        for (int i = 0; i < 30; ++i) product = product.mm(product);
      }
      return Net<optim::AdamW>::training_step(batch, batch_idx);
    }
    static bool& is_busy() {
      static bool busy = false;
      return busy;
    }
  };
  for (const StrategyChoice& strategy :
       {StrategyChoice("zero_offload"), StrategyChoice(DelayedUpdate{.warmup_steps = 0}),
        StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0})}) {
    SCOPED_TRACE(strategy.name());
    std::vector<at::Tensor> weights;
    for (const bool is_busy : {false, true}) {
      Busy::is_busy() = is_busy;
      const auto module = make_module<Busy>();
      TrainerOptions options = testing::quiet({.strategy = strategy, .max_epochs = 2});
      options.accelerator = "cuda";
      options.devices = 1;
      Trainer(options).fit(module, {.train = DataLoader::make(testing::tiny_dataset(48), {.batch_size = 4})});
      weights.push_back(testing::flat_weights(*module));
    }
    EXPECT_LT(((weights[0] - weights[1]).norm() / weights[0].norm()).item<double>(), 1e-5);
  }
}

// A pinned batch goes back to the pool of pinned memory before its copy has run.
TEST(Gpu, BatchesArriveAsTheyWereTaken) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const c10::Device gpu(c10::kCUDA, 0);
  at::Tensor product = torch::eye(4096, gpu);
  for (int i = 0; i < 40; ++i) product = product.mm(product);  // keeps the GPU busy, so that the copies below wait
  std::vector<Batch> moved;
  for (int i = 0; i < 20; ++i) {
    const Batch batch{{"x", torch::full({1 << 18}, i)}};
    moved.push_back(batch.pin().to(gpu, /*non_blocking=*/true));
  }
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(moved[static_cast<size_t>(i)]["x"].eq(i).all().item<bool>()) << i;
}

// The course of a run: what each step logged, and the weights at the end. Some batches are smaller than the others.
template <class M>
std::pair<std::vector<double>, at::Tensor> course_of(const Training& training) {
  seed_everything(7);
  const auto module = make_module<M>();
  TrainerOptions options = testing::quiet({.strategy = training.strategy,
                                           .max_epochs = 3,
                                           .precision = training.precision,
                                           .accumulate_grad_batches = training.accumulate,
                                           .gradient_clip_val = training.clip,
                                           .cuda_graph = training.cuda_graph});
  options.accelerator = "cuda";
  options.devices = 1;
  options.deterministic = true;
  std::vector<at::Tensor> losses;  // read at the end, so that the host is ahead of the GPU
  std::vector<double> values;
  options.callbacks = {LambdaCallback::make(
      {.on_train_batch_end = [&](TrainerControl&, const at::Tensor& loss, const Batch&,
                                 int64_t) { losses.push_back(loss); },
       .on_train_epoch_end =
           [&](TrainerControl& trainer) { values.push_back(trainer.metrics().callback_metrics().at("train_loss")); }})};
  Trainer(options).fit(
      module, {.train = DataLoader::make(testing::tiny_dataset(58), {.batch_size = 4, .shuffle = true, .seed = 3})});
  for (const at::Tensor& loss : losses) values.push_back(loss.item<double>());
  return {values, testing::flat_weights(*module)};
}

struct Dropping : Net<optim::AdamW> {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor x = torch::dropout(thawing->forward(batch["x"]), 0.3, is_training());
    const at::Tensor value = loss({{"x", x}, {"y", batch["y"]}}) + wide->weight.square().mean();
    log("train_loss", value);
    return value;
  }
};

// The same kernels on the same numbers: the same bits. The module freezes and unfreezes parameters.
TEST(Gpu, AGraphTakesTheStepsThatKernelsTakeOneByOne) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  for (const StrategyChoice& strategy : {StrategyChoice("single_device"), StrategyChoice("zero_offload"),
                                         StrategyChoice(DelayedUpdate{.warmup_steps = 0}),
                                         StrategyChoice(DelayedUpdate{.base = "single_device", .warmup_steps = 0})}) {
    for (Training training : {Training{strategy}, Training{strategy, "bf16-mixed", 0.05},
                              Training{strategy, "32", 0.05, 2}, Training{strategy, "bf16-true", 0.05, 3}}) {
      SCOPED_TRACE(c10::str(strategy.name(), " ", training.precision, " ", training.accumulate));
      const auto expected = course_of<Dropping>(training);
      training.cuda_graph = true;
      ::testing::internal::CaptureStderr();
      const auto found = course_of<Dropping>(training);
      const std::string said = ::testing::internal::GetCapturedStderr();
      EXPECT_THAT(said, HasSubstr("is replayed from epoch 0, batch 3 on"));
      EXPECT_THAT(said, ::testing::Not(HasSubstr("cannot be recorded")));
      EXPECT_EQ(found.first, expected.first);
      EXPECT_TRUE(found.second.equal(expected.second));
    }
  }
}

struct Waiting : Dropping {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor value = Dropping::training_step(batch, batch_idx);
    return value.item<double>() > 0 ? value : value * 2;
  }
};

struct Counting : Dropping {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("batch_idx", static_cast<double>(batch_idx));
    return Dropping::training_step(batch, batch_idx);
  }
};

template <class M>
void expect_runs_without_graph(const std::string& reason) {
  for (const char* precision : {"32", "bf16-mixed"}) {
    const auto expected = course_of<M>({.precision = precision});
    ::testing::internal::CaptureStderr();
    const auto found = course_of<M>({.precision = precision, .cuda_graph = true});
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr(reason));
    EXPECT_EQ(found.first, expected.first);
    EXPECT_TRUE(found.second.equal(expected.second));
  }
}

struct UpdatesInBackward : Net<optim::AdamW> {
  metrics::Mean norm{};
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor x = thawing->forward(batch["x"]);
    x.register_hook([this](const at::Tensor& gradient) { norm.update(gradient.norm()); });
    const at::Tensor value = loss({{"x", x}, {"y", batch["y"]}}) + wide->weight.square().mean();
    log("train_loss", value);
    return value;
  }
};

// Hooks of backward run on a thread of autograd, and a rehearsal does not see them.
TEST(Gpu, AHookOfBackwardIsSeenByTheRecording) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  expect_runs_without_graph<UpdatesInBackward>("the metric Mean is updated, which no replay does");
}

TEST(Gpu, AStepThatCannotBeRecordedRunsWithoutAGraph) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  expect_runs_without_graph<Waiting>("operation not permitted when stream is capturing");
  expect_runs_without_graph<Counting>("log('batch_idx') takes a number of the host");
}

struct Drawing : testing::TinyModule {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    const at::Tensor drawn = torch::rand({16}, batch["x"].device()).cpu();
    {
      const std::lock_guard lock(mutex());
      by_device()[batch["x"].device().str()] = drawn;
    }
    return testing::TinyModule::training_step(batch, batch_idx);
  }
  static std::map<std::string, at::Tensor>& by_device() {
    static std::map<std::string, at::Tensor> drawn;
    return drawn;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

TEST(Gpu, PartsOfADpBatchDrawDifferentNumbers) {
  if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() < 2) GTEST_SKIP() << "there are no two GPUs";
  TrainerOptions options = testing::quiet({.strategy = "dp", .max_steps = 1});
  options.accelerator = "cuda";
  options.devices = 2;
  seed_everything(5);
  Trainer(options).fit(make_module<Drawing>(), {.train = testing::tiny_loader()});
  ASSERT_EQ(Drawing::by_device().size(), 2U);
  EXPECT_FALSE(Drawing::by_device().at("cuda:0").equal(Drawing::by_device().at("cuda:1")));
}

}  // namespace
}  // namespace fulgur
