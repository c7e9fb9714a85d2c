// What a group calls of c10d's backend of a device, here a backend that only counts calls, on the meta device.
#include "fulgur/distributed/process_collective.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

using ::testing::ContainsRegex;
using ::testing::Not;

struct Calls {
  int shutdowns = 0, aborts = 0;
  bool shutdown_throws = false;
  bool work_has_a_future = false;
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(Calls& calls) : c10d::Backend(/*rank=*/0, /*size=*/1), calls_(calls) {}
  const std::string getBackendName() const override { return "counting"; }
  void abort() override { ++calls_.aborts; }
  void shutdown() override {
    ++calls_.shutdowns;
    if (calls_.shutdown_throws) throw std::runtime_error("no");
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<Done>(calls_.work_has_a_future);
  }

 private:
  // May have no future, like NCCL's work for tensors that do not divide evenly.
  struct Done final : c10d::Work {
    explicit Done(bool given) : has_future(given) {}
    bool has_future;
    bool wait(std::chrono::milliseconds) override { return true; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      if (!has_future) return nullptr;
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
      future->markCompleted();
      return future;
    }
  };

  Calls& calls_;
};

std::unique_ptr<ProcessCollective> group_of(Calls& calls) {
  using std::chrono::milliseconds;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  return std::make_unique<ProcessCollective>(
      GroupConfig{.name = "data", .store = store, .ranks = {0}, .timeout = milliseconds(1000), .device = c10::kMeta},
      std::make_shared<Heartbeat>(store, /*rank=*/0, /*store_rank=*/0, /*interval=*/milliseconds(50),
                                  /*timeout=*/milliseconds(60000)),
      std::vector<ConnectTransport>{[&calls](const GroupConfig&) -> Connection {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(calls));
      }});
}

at::Tensor ones_nobody_reads() { return at::zeros({3}, at::TensorOptions(c10::kMeta)); }

TEST(ProcessCollective, AHealthyGroupOfADeviceEndsByShutdown) {
  Calls calls;
  group_of(calls)->all_reduce(ones_nobody_reads()).wait();
  EXPECT_EQ(calls.shutdowns, 1);
  EXPECT_EQ(calls.aborts, 0);
}

TEST(ProcessCollective, AGroupThatFailedEndsByAbort) {
  Calls calls;
  group_of(calls)->abort("a rank has failed");
  EXPECT_EQ(calls.shutdowns, 0);
  EXPECT_GE(calls.aborts, 1);
}

TEST(ProcessCollective, AGroupThatDoesNotShutDownIsAborted) {
  Calls calls{.shutdown_throws = true};
  group_of(calls).reset();
  EXPECT_EQ(calls.shutdowns, 1);
  EXPECT_EQ(calls.aborts, 1);
}

// With a trace, a span ends when the future completes.
TEST(ProcessCollective, OnlyWorkWithAFutureHasASpan) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto folder = std::filesystem::path(::testing::TempDir()) / "process_collective_test";
  ::setenv("FULGUR_TRACE", folder.c_str(), /*overwrite=*/1);
  EXPECT_EXIT(
      {
        for (const bool has_future : {true, false, true}) {
          Calls calls{.work_has_a_future = has_future};
          group_of(calls)->all_reduce(ones_nobody_reads()).wait();
        }
        std::exit(0);  // writes the trace
      },
      ::testing::ExitedWithCode(0), "");
  const std::string trace = testing::read_file(folder / "rank-0.json");
  EXPECT_THAT(trace, ContainsRegex("all_reduce.*all_reduce"));
  EXPECT_THAT(trace, Not(ContainsRegex("all_reduce.*all_reduce.*all_reduce")));
}

}  // namespace
}  // namespace fulgur
