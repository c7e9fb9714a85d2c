#include "fulgur/distributed/gloo_transport.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <vector>

#include "tests/testing/errors.h"

namespace fulgur {
namespace {

using testing::message_of;

class Transfer final : public c10d::Work {
 public:
  explicit Transfer(bool fails) : fails_(fails) {}
  bool wait(std::chrono::milliseconds) override {
    if (fails_) throw std::runtime_error("the cable is cut");
    return true;
  }

 private:
  const bool fails_;
};

// Rank 0 of 2, for which only the first message is lost.
class FailsOnce final : public c10d::Backend {
 public:
  FailsOnce() : Backend(0, 2) {}
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override {
    return c10::make_intrusive<Transfer>(false);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int, int) override {
    return c10::make_intrusive<Transfer>(num_received_++ == 0);
  }

 private:
  int num_received_ = 0;
};

using CallOf = std::function<void(GlooTransport&)>;
const std::vector<CallOf> kCalls{
    [](GlooTransport& group) { group.all_reduce(torch::ones({8}), ReduceOp::sum); },
    [](GlooTransport& group) {
      group.reduce_scatter(torch::ones({8}), ReduceOp::sum, torch::ones({4}), {.stride = 4, .size = 4});
    },
    [](GlooTransport& group) { group.all_gather(torch::ones({8}), {.stride = 4, .size = 4}); },
    [](GlooTransport& group) { group.barrier(); },
    [](GlooTransport& group) { group.small_all_reduce(torch::ones({8}), ReduceOp::sum)->finish(); },
};

TEST(GlooTransport, ThrowTheirFirstErrorFromThenOn) {
  for (const CallOf& first : kCalls) {
    GlooTransport group(c10::make_intrusive<FailsOnce>(), /*timeout=*/std::chrono::seconds(1),
                        {.rank_order_all_reduce = true, .staging_bytes = 64});
    EXPECT_EQ(message_of<std::runtime_error>([&] { first(group); }), "the cable is cut");
    for (const CallOf& later : kCalls) {
      EXPECT_EQ(message_of<std::runtime_error>([&] { later(group); }), "the cable is cut");
    }
  }
}

}  // namespace
}  // namespace fulgur
