#include "fulgur/device/stream_worker.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/types.h>

#include <memory>
#include <stdexcept>
#include <thread>

#include "fulgur/base/cores_of_process.h"

namespace fulgur {
namespace {

using ::testing::ElementsAre;

TEST(SideWorkerTest, JobsRunOneAfterAnotherOnAThreadOfTheirOwn) {
  StreamWorker worker(c10::kCPU);
  std::vector<int> order;  // unguarded: get() synchronizes
  std::thread::id thread;
  std::shared_future<void> last;
  for (int i = 0; i < 5; ++i) {
    last = worker.run([&, i] {
      order.push_back(i);
      thread = std::this_thread::get_id();
    });
  }
  last.get();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST(SideWorkerTest, GetThrowsWhatTheJobThrewAndLaterJobsRun) {
  StreamWorker worker(c10::kCPU);
  const auto fails = worker.run([] { throw std::runtime_error("no"); });
  bool ran = false;
  worker.run([&] { ran = true; }).get();
  EXPECT_THROW(fails.get(), std::runtime_error);
  EXPECT_TRUE(ran);
}

TEST(SideWorkerTest, ItsThreadsAreItsOwn) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  StreamWorker alone(c10::kCPU, {.one_thread = true}), other(c10::kCPU);
  int of_alone = 0, of_other = 0;
  alone.run([&] { of_alone = at::get_num_threads(); }).get();
  other.run([&] { of_other = at::get_num_threads(); }).get();
  EXPECT_EQ(of_alone, 1);
  EXPECT_EQ(of_other, 2);
  EXPECT_EQ(at::get_num_threads(), 2);
  at::set_num_threads(before);
}

TEST(SideWorkerTest, IsBoundToItsCore) {
  const int core = cores_of_process().back();
  StreamWorker worker(c10::kCPU, {.core = core});
  std::vector<int> cores;
  worker.run([&] { cores = cores_of_process(); }).get();
  EXPECT_THAT(cores, ElementsAre(core));
}

TEST(SideWorkerTest, ItsEndDropsTheJobsThatWait) {
  std::promise<void> begun, go_on;
  std::shared_future<void> waits;
  bool ran = false;
  std::thread ends;
  {
    auto worker = std::make_unique<StreamWorker>(c10::kCPU);
    worker->run([&, may_go_on = go_on.get_future().share()] {
      begun.set_value();
      may_go_on.get();
    });
    begun.get_future().get();
    waits = worker->run([&] { ran = true; });
    ends = std::thread([dropped = std::move(worker)]() mutable { dropped.reset(); });
  }
  EXPECT_THROW(waits.get(), std::future_error);
  go_on.set_value();
  ends.join();
  EXPECT_FALSE(ran);
}

const c10::Device kGpu(c10::kCUDA, 0);

// Keeps the current stream busy for some milliseconds; the last kernel writes 1.
void write_late(const at::Tensor& value) {
  at::Tensor product = torch::eye(4096, kGpu);
  for (int i = 0; i < 40; ++i) product = product.mm(product);
  value.copy_(product[0][0]);
}

TEST(SideWorkerTest, OnAGpuAJobComesAfterWhatItsCallerAskedBefore) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  StreamWorker worker(kGpu);
  const at::Tensor value = torch::zeros({}, kGpu);
  at::Tensor seen;
  write_late(value);
  worker.run([&] { seen = value.cpu(); }).get();
  EXPECT_EQ(seen.item<float>(), 1.0F);
}

TEST(SideWorkerTest, OnAGpuAJobIsDoneWhenTheDeviceHasDoneItsPart) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  StreamWorker worker(kGpu);
  const at::Tensor on_host = torch::zeros({}).pin_memory();
  worker
      .run([&] {
        const at::Tensor value = torch::zeros({}, kGpu);
        write_late(value);
        on_host.copy_(value, /*non_blocking=*/true);
      })
      .get();
  EXPECT_EQ(*on_host.const_data_ptr<float>(), 1.0F);
}

TEST(SideWorkerTest, OnAGpuTheDeviceHasDoneItsPartOfAJobThatThrew) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  StreamWorker worker(kGpu);
  const at::Tensor on_host = torch::zeros({}).pin_memory();
  const auto fails = worker.run([&] {
    const at::Tensor value = torch::zeros({}, kGpu);
    write_late(value);
    on_host.copy_(value, /*non_blocking=*/true);
    throw std::runtime_error("no");
  });
  EXPECT_THROW(fails.get(), std::runtime_error);
  EXPECT_EQ(*on_host.const_data_ptr<float>(), 1.0F);
}

}  // namespace
}  // namespace fulgur
