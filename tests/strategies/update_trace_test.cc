// A delayed update runs concurrently with the next step, as the trace of a run shows. Update and step wait for each
// other, so that a run in which they take turns would not complete.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/presets.h"
#include "tests/testing/odd_net.h"
#include "tests/testing/temp_dir.h"

namespace fulgur {
namespace {

constexpr size_t kSteps = 4;

// Counts events; waiting for an event throws after 30 s.
class Meeting {
 public:
  void tell(const std::string& event) {
    const std::lock_guard lock(mutex_);
    ++counts_[event];
    changed_.notify_all();
  }
  void wait_for(const std::string& event, size_t count) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::seconds(30), [&] { return counts_[event] >= count; })) return;
    throw std::runtime_error("there is no " + event + " while the other one waits");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, size_t> counts_;
};

Meeting& meeting() {
  static Meeting one;
  return one;
}

// SGD, whose update of a step ends once the next step is in backward.
class Patient final : public optim::ElementWiseOptimizer {
 public:
  explicit Patient(std::vector<at::Tensor> params)
      : ElementWiseOptimizer("Patient", {{.params = std::move(params)}}, 1e-2, 0, {}) {}
  optim::Rule rule(const Group& group, int64_t num_updates) const override {
    const auto number = static_cast<size_t>(num_updates);
    meeting().tell("update");
    if (number < kSteps) meeting().wait_for("backward", number + 1);
    return optim::SGD(params(), {.lr = group.lr}).rule(group, num_updates);
  }

 protected:
  void update_with_torch(const Group&, int64_t, const TensorLists&, const std::optional<at::Tensor>&) override {}
};

struct Waiting : testing::TinyModule {
  size_t num_forwards = 0;
  Waiting() {
    hidden->weight.register_hook([](const at::Tensor&) { meeting().tell("backward"); });  // near the end of backward
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    meeting().wait_for("update", num_forwards++);
    return TinyModule::training_step(batch, batch_idx);
  }
  Optimizers configure_optimizers() override { return Patient(parameters()); }
};

void train(const std::string& base) {
  const DelayedUpdate delayed{.base = base, .predict = "none", .warmup_steps = 0, .host = {.update_threads = 1}};
  Trainer trainer(testing::quiet({.strategy = delayed, .max_steps = kSteps}));
  trainer.fit(make_module<Waiting>(), {.train = testing::tiny_loader()});
}

struct Interval {
  double begin, end;
  bool meets(const Interval& other) const { return begin < other.end && other.begin < end; }
};

std::map<std::string, std::vector<Interval>> spans_of(const std::filesystem::path& trace) {
  std::map<std::string, std::vector<Interval>> spans;
  for (const auto& event : nlohmann::json::parse(testing::read_file(trace))) {
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts");
    spans[event.at("name")].push_back({begin, begin + event.at("dur").get<double>()});
  }
  for (auto& [name, found] : spans) std::ranges::sort(found, {}, &Interval::begin);
  return spans;
}

class UpdateTraceTest : public ::testing::TestWithParam<const char*> {};

TEST_P(UpdateTraceTest, ALateUpdateLiesBesideTheNextForwardAndBackward) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / GetParam();
  ::setenv("FULGUR_TRACE", folder.c_str(), 1);
  EXPECT_EXIT((train(GetParam()), std::exit(0)), ::testing::ExitedWithCode(0), "");  // exit() writes the trace
  auto spans = spans_of(folder / "rank-0.json");
  for (const std::string name : {"forward", "backward", "update"}) ASSERT_EQ(spans[name].size(), kSteps) << name;
  for (size_t step = 0; step + 1 < kSteps; ++step) {
    EXPECT_TRUE(spans["update"][step].meets(spans["forward"][step + 1])) << step;
    EXPECT_TRUE(spans["update"][step].meets(spans["backward"][step + 1])) << step;
    EXPECT_FALSE(spans["update"][step].meets(spans["update"][step + 1])) << step;
  }
  ASSERT_EQ(spans["publish"].size(), kSteps);
  for (const Interval& publish : spans["publish"]) {  // parameters change between steps only
    for (const std::string name : {"forward", "backward"}) {
      for (const Interval& of_step : spans[name]) EXPECT_FALSE(publish.meets(of_step)) << name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, UpdateTraceTest, ::testing::Values("single_device", "zero_offload"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fulgur
