#include "fulgur/strategies/forwarding_strategy.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using ::testing::UnorderedElementsAreArray;

// A strategy that does nothing but write down the names of the members that are called.
class Records final : public Strategy {
 public:
  explicit Records(std::vector<std::string>& calls) : calls_(calls) {}

  std::string name() const override { return calls_.emplace_back(__func__); }
  void describe(FieldVisitor&) override { calls_.emplace_back(__func__); }
  void check_devices(const std::vector<c10::Device>&, int64_t) const override { calls_.emplace_back(__func__); }
  std::optional<WorldOptions> rank_per_device() const override {
    calls_.emplace_back(__func__);
    return std::nullopt;
  }
  void setup(Module&, const StrategySetup&) override { calls_.emplace_back(__func__); }
  void setup_optimizers(Optimizers) override { calls_.emplace_back(__func__); }
  const Optimizers& optimizers() const override {
    calls_.emplace_back(__func__);
    return optimizers_;
  }
  Batch to_device(const Batch& batch) override {
    calls_.emplace_back(__func__);
    return batch;
  }
  at::Tensor training_step(const Batch&, int64_t) override {
    calls_.emplace_back(__func__);
    return {};
  }
  void zero_grad(size_t) override { calls_.emplace_back(__func__); }
  void backward(const at::Tensor&, bool) override { calls_.emplace_back(__func__); }
  AccumulationWindow end_micro_batch(const AccumulationWindow& mine, bool) override {
    calls_.emplace_back(__func__);
    return mine;
  }
  void manual_backward(const at::Tensor&) override { calls_.emplace_back(__func__); }
  std::optional<ModelMemory> model_memory(const Module&, const Optimizers&, const MemoryRequest&) const override {
    calls_.emplace_back(__func__);
    return std::nullopt;
  }
  StepReport optimizer_step(size_t, const StepRequest&) override {
    calls_.emplace_back(__func__);
    return {};
  }
  void average_weights(double) override { calls_.emplace_back(__func__); }
  bool show_evaluated(bool) override {
    calls_.emplace_back(__func__);
    return false;
  }
  void drain() override { calls_.emplace_back(__func__); }
  void materialize_gradients(size_t, int64_t) override { calls_.emplace_back(__func__); }
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override {
    calls_.emplace_back(__func__);
    return {};
  }
  StrategyState state() override {
    calls_.emplace_back(__func__);
    return {};
  }
  void load_state(const State&, const ReadRange&) override { calls_.emplace_back(__func__); }
  void teardown() noexcept override { calls_.emplace_back(__func__); }

 private:
  std::vector<std::string>& calls_;
  Optimizers optimizers_;
};

// Sets timeout_s, if there is such a setting.
class SetsTimeout final : public FieldVisitor {
 public:
  void operator()(const Field& field, FieldValue value) override {
    if (field.name == "timeout_s") set_field(field, value, "9");
  }
};

// The names of all virtual members of Strategy, as its header declares them.
std::vector<std::string> virtual_members_of_strategy() {
  std::ifstream stream("strategies/strategy.h");
  const std::string header{std::istreambuf_iterator<char>(stream), {}};
  const std::regex member(R"(\bvirtual [^~(;]*?(\w+)\()");
  std::vector<std::string> names;
  for (auto match = std::sregex_iterator(header.begin(), header.end(), member); match != std::sregex_iterator();
       ++match) {
    names.push_back((*match)[1]);
  }
  return names;
}

// A member that Strategy gets and ForwardingStrategy does not forward would have the default of Strategy instead of the
// base's. This test then fails until the member is forwarded, recorded above, and called here.
TEST(ForwardingStrategy, ForwardsEveryVirtualMemberOfStrategy) {
  std::vector<std::string> calls;
  ForwardingStrategy strategy(std::make_unique<Records>(calls));
  SetsTimeout visitor;
  Module module;
  World world;
  strategy.name();
  strategy.describe(visitor);
  strategy.check_devices({}, 1);
  strategy.rank_per_device();
  strategy.setup(module, {.devices = {c10::kCPU}, .world = world});
  strategy.setup_optimizers({});
  strategy.optimizers();
  strategy.to_device({});
  strategy.training_step({}, 0);
  strategy.zero_grad(0);
  strategy.backward({}, true);
  strategy.end_micro_batch({}, true);
  strategy.manual_backward({});
  strategy.model_memory(module, {}, {});
  strategy.optimizer_step(0, {});
  strategy.average_weights(0.5);
  strategy.show_evaluated(true);
  strategy.drain();
  strategy.materialize_gradients(0, 1);
  strategy.module_state();
  strategy.state();
  strategy.load_state({}, {});
  strategy.teardown();
  EXPECT_THAT(calls, UnorderedElementsAreArray(virtual_members_of_strategy()));
}

TEST(ForwardingStrategy, HasTheSettingsOfItsBase) {
  ForwardingStrategy strategy("ddp");
  SetsTimeout nine;
  strategy.describe(nine);
  EXPECT_EQ(strategy.rank_per_device()->timeout_s, 9);
}

TEST(ForwardingStrategy, TrainsAsItsBase) {
  for (const char* base : {"ddp", "ddp_sharded", "zero_offload"}) {
    const std::string name = std::string("forwards_to_") + base;
    strategy_registry().add(name, [base] { return std::make_unique<ForwardingStrategy>(base); });
    run_ranks(2, [&](World& world) {
      const testing::Case c{.accumulate = 2, .clip = 0.05};
      const at::Tensor expected = testing::train<testing::Net<optim::AdamW>>(world, c, base);
      EXPECT_TRUE(testing::train<testing::Net<optim::AdamW>>(world, c, name).equal(expected)) << name;
    });
  }
}

TEST(ForwardingStrategy, OverNothingIsRefused) {
  EXPECT_THAT(message_of<UsageError>([] { ForwardingStrategy strategy("dpp"); }),
              HasSubstr("unknown strategy 'dpp'; did you mean 'ddp'?"));
  EXPECT_THAT(message_of<c10::ValueError>([] { ForwardingStrategy strategy(std::unique_ptr<Strategy>{}); }),
              HasSubstr("is null"));
}

}  // namespace
}  // namespace fulgur
