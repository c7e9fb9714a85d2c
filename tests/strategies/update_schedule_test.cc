// Updates on worker threads, at once and delayed, compared with the recurrence over plain tensors. Parameters are
// read all the time, so that tsan finds a worker that writes them.
#include "fulgur/strategies/engine/update_schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <optional>

#include "fulgur/distributed/local_collective.h"
#include "fulgur/optim/adam.h"
#include "fulgur/strategies/engine/gradient_reducer.h"

namespace fulgur {
namespace {

constexpr int64_t kSteps = 12;
constexpr int64_t kWarmup = 3;
constexpr optim::AdamWOptions kOptions{.lr = 1e-2};

struct Net : torch::nn::Module {
  Net() {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    for (const int64_t size : {700, 64, 129, 1}) {
      register_parameter(fmt::format("of_{}", size), torch::randn({size}, generator));
    }
  }
  void backward(int64_t step) {
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& param : parameters()) loss = loss + (param * static_cast<double>(step + 1)).cos().sum();
    loss.backward();
  }
};

double read(const Net& net) {  // reads in our own code, which tsan sees
  double sum = 0;
  for (const at::Tensor& param : net.parameters()) {
    const auto* values = param.const_data_ptr<float>();
    for (int64_t i = 0; i < param.numel(); ++i) sum += static_cast<double>(values[i]);
  }
  return sum;
}

std::vector<at::Tensor> recurrence(bool late) {
  Net net;
  std::vector<at::Tensor> owned;
  for (const at::Tensor& param : net.parameters()) owned.push_back(param.detach().clone().requires_grad_());
  optim::AdamW optimizer(owned, kOptions);
  const auto apply = [&](const std::vector<at::Tensor>& gradients) {
    for (size_t i = 0; i < owned.size(); ++i) owned[i].mutable_grad() = gradients[i];
    optimizer.step(GradientTransform{});
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < owned.size(); ++i) net.parameters()[i].copy_(owned[i]);
  };
  std::optional<std::vector<at::Tensor>> pending;
  for (int64_t step = 0; step < kSteps; ++step) {
    net.zero_grad();
    net.backward(step);
    std::vector<at::Tensor> now;
    for (const at::Tensor& param : net.parameters()) now.push_back(param.grad().clone());
    if (pending) apply(*std::exchange(pending, std::nullopt));
    const bool is_late = late && step >= kWarmup;
    is_late ? void(pending = now) : apply(now);
  }
  if (pending) apply(*pending);
  return owned;
}

struct Setting {
  bool late;
  int64_t num_workers;
  double host_ratio;
};

class UpdateScheduleTest : public ::testing::TestWithParam<Setting> {};

TEST_P(UpdateScheduleTest, IsTheRecurrenceBitForBit) {
  const auto [late, num_workers, host_ratio] = GetParam();
  Net net;
  const Optimizers optimizers(optim::AdamW(net.parameters(), kOptions));
  const FlatParameters flat(net, optimizers, {.first_bucket_bytes = 1024, .bucket_cap_bytes = 1024});
  ASSERT_GT(flat.buckets().size(), 1U);
  OptimizerShard shard(
      flat, optimizers,
      {.host_ratio = host_ratio, .copies = late, .num_workers = num_workers, .gradient_sums = late ? 2 : 1});
  LocalCollective alone;
  StreamWorker copy_worker(c10::kCPU, {.one_thread = true});
  GradientReducer reducer(
      flat, alone, alone,
      {.make_sums = [&](size_t bucket) { return shard.make_sums(bucket); }, .copy_worker = &copy_worker});
  UpdateSchedule schedule(flat, optimizers, shard, reducer.sums(), alone, c10::kCPU, {.count = num_workers});
  for (int64_t step = 0; step < kSteps; ++step) {
    reducer.sums().clear();
    reducer.begin();
    const double before = read(net);
    net.backward(step);
    EXPECT_EQ(read(net), before);  // unchanged whatever the workers do
    std::vector<double> nothing;
    reducer.finish(nothing);
    const UpdateSchedule::LateOptions options;
    schedule.step(0, {}, late && step >= kWarmup ? &options : nullptr);
  }
  EXPECT_EQ(schedule.is_late(), late);
  schedule.drain();
  flat.check_in_place();
  const auto params = net.parameters(), expected = recurrence(late);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(params[i].equal(expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(, UpdateScheduleTest,
                         ::testing::Values(Setting{false, 1, 1}, Setting{false, 3, 1}, Setting{true, 1, 1},
                                           Setting{true, 3, 1}, Setting{true, 2, 0.5}, Setting{true, 2, 0}),
                         [](const auto& test) {
                           return fmt::format("{}By{}OnHost{}", test.param.late ? "Late" : "AtOnce",
                                              test.param.num_workers, static_cast<int>(100 * test.param.host_ratio));
                         });

TEST(UpdateSchedule, WorkersLeaveCoresToThreadsThatFeedAGpu) {
  EXPECT_EQ(UpdateSchedule::default_workers(16, 1, /*on_gpu=*/false), 16);
  EXPECT_EQ(UpdateSchedule::default_workers(16, 1, /*on_gpu=*/true), 12);
  EXPECT_EQ(UpdateSchedule::default_workers(192, 8, /*on_gpu=*/true), 20);
  EXPECT_EQ(UpdateSchedule::default_workers(8, 3, /*on_gpu=*/false), 2);
  for (const bool on_gpu : {false, true}) {
    EXPECT_EQ(UpdateSchedule::default_workers(1, 1, on_gpu), 1);
    EXPECT_EQ(UpdateSchedule::default_workers(2, 4, on_gpu), 1);
  }
}

}  // namespace
}  // namespace fulgur
