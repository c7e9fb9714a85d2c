// Collectives on a GPU over NCCL: every rank needs a GPU to itself, so here there is one rank, which gets what it gave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <ATen/Context.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "fulgur/base/exception_text.h"
#include "fulgur/distributed/world.h"
#include "fulgur/distributed/world_stores.h"

namespace fulgur {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

const c10::Device kGpu(c10::kCUDA, 0);

World one_rank() {
  return World(WorldStores(c10::make_intrusive<c10d::HashStore>()), /*rank=*/0, /*world_size=*/1, /*store_rank=*/0,
               {.address = "127.0.0.1"}, {.device = kGpu, .timeout_s = 60, .heartbeat_interval_s = 0.1});
}

void expect_what_was_given(World& world, at::ScalarType dtype) {
  for (const int64_t size : {1, 1003}) {
    const at::Tensor given = torch::arange(size, at::device(kGpu)).fmod(7).to(dtype);
    const at::Tensor flat = given.clone(), into = torch::zeros_like(given);
    world.data().all_reduce(flat).wait();
    world.data().broadcast(flat, /*root=*/0).wait();
    world.data().all_gather(flat).wait();
    world.data().reduce_scatter(flat, ReduceOp::sum, into).wait();
    world.data().barrier();
    EXPECT_TRUE(flat.equal(given)) << dtype;
    EXPECT_TRUE(into.equal(given)) << dtype;
  }
}

TEST(Nccl, RunsEveryCollective) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  World world = one_rank();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong}) {
    expect_what_was_given(world, dtype);
  }
}

TEST(Nccl, WithoutAGpuTheErrorSaysSo) {
  if (at::hasCUDA()) GTEST_SKIP() << "this machine has a GPU";
  std::string why;
  try {
    one_rank();
  } catch (...) {
    why = text_of(std::current_exception());
  }
  EXPECT_THAT(why, AnyOf(HasSubstr("no GPUs found"), HasSubstr("FULGUR_CUDA=0")));
}

}  // namespace
}  // namespace fulgur
