// When a step is recorded, when it is replayed, and when it runs without a graph. In place of a CUDA graph a step is
// called again, so that this runs on a CPU; tests/strategies/gpu_test.cc has the graphs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/callbacks/lambda_callback.h"
#include "fulgur/metrics/aggregation.h"
#include "fulgur/optim/adam.h"
#include "fulgur/strategies/engine/graphed_step.h"
#include "fulgur/strategies/forwarding_strategy.h"
#include "fulgur/strategies/presets.h"
#include "tests/testing/errors.h"
#include "tests/testing/odd_net.h"

namespace fulgur {
namespace {

using ::testing::HasSubstr;
using testing::Net;
using ::testing::Not;

std::function<void()> call_again(const std::function<void()>& body) {
  body();
  return body;
}

// As on a GPU, no code of the host runs in a replay; here nothing is computed either.
std::function<void()> compute_nothing(const std::function<void()>& body) {
  body();
  return [] {};
}

// single_device, whose training_step is recorded and replayed.
struct Graphed : ForwardingStrategy {
  explicit Graphed(GraphedStep::Record record) : ForwardingStrategy("single_device"), record_(std::move(record)) {}
  void setup(Module& module, const StrategySetup& setup) override {
    ForwardingStrategy::setup(module, setup);
    precision_ = setup.precision;
    step_.emplace(module, precision_, c10::Device(c10::kCPU), record_);
  }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return step_->run(batch, batch_idx, /*keeps_gradients=*/!std::exchange(begins_window_, false));
  }
  AccumulationWindow end_micro_batch(const AccumulationWindow& mine, bool is_last) override {
    begins_window_ = is_last;
    return ForwardingStrategy::end_micro_batch(mine, is_last);
  }
  void teardown() noexcept override {
    step_.reset();
    ForwardingStrategy::teardown();
  }

 private:
  const GraphedStep::Record record_;
  Precision precision_{};
  std::optional<GraphedStep> step_{};
  bool begins_window_ = true;
};

[[maybe_unused]] const bool g_is_registered = [] {
  strategy_registry().add("graphed", [] { return std::make_unique<Graphed>(call_again); });
  strategy_registry().add("graphed_emptily", [] { return std::make_unique<Graphed>(compute_nothing); });
  return true;
}();

struct Course {
  std::vector<double> values{};  // the loss of each batch, and what was logged of it
  at::Tensor weights{};
  std::string said{};
};

template <class M>
Course course_of(const std::string& strategy, int64_t accumulate = 1, int64_t num_samples = 56) {
  Course course;
  const auto module = make_module<M>();
  TrainerOptions options =
      testing::quiet({.strategy = strategy, .max_epochs = 3, .accumulate_grad_batches = accumulate});
  options.callbacks = {LambdaCallback::make(
      {.on_train_batch_end = [&](TrainerControl& trainer, const at::Tensor& loss, const Batch&, int64_t) {
        if (loss.defined()) course.values.push_back(loss.item<double>());
        course.values.push_back(trainer.metrics().callback_metrics().at("train_loss"));
      }})};
  ::testing::internal::CaptureStderr();
  Trainer(options).fit(module, {.train = DataLoader::make(testing::tiny_dataset(num_samples), {.batch_size = 4})});
  course.said = ::testing::internal::GetCapturedStderr();
  course.weights = testing::flat_weights(*module);
  return course;
}

void expect_equal(const Course& found, const Course& expected) {
  EXPECT_EQ(found.values, expected.values);
  EXPECT_TRUE(found.weights.equal(expected.weights));
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct Plain : Net<optim::AdamW> {
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value =
        loss({{"x", thawing->forward(batch["x"])}, {"y", batch["y"]}}) + wide->weight.square().mean();
    log("train_loss", value);
    return value;
  }
};

TEST(GraphedStep, IsTheStepItself) {
  for (const int64_t accumulate : {1, 3}) {
    SCOPED_TRACE(accumulate);
    const Course found = course_of<Plain>("graphed", accumulate),
                 expected = course_of<Plain>("single_device", accumulate);
    expect_equal(found, expected);
    EXPECT_THAT(found.said, HasSubstr("is replayed from epoch 0, batch 3 on"));
    EXPECT_THAT(found.said, Not(HasSubstr("without a graph")));
    EXPECT_EQ(count(expected.said, "recorded"), 0U);
  }
}

// Net freezes and unfreezes parameters at the beginning of epochs 1 and 2.
TEST(GraphedStep, IsRecordedAnewForOtherParameters) {
  EXPECT_EQ(count(course_of<Plain>("graphed").said, "was recorded"), 3U);
}

struct InTurns : Plain {
  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    hidden->train(batch_idx < 8);
    return BatchAction::run;
  }
};

TEST(GraphedStep, IsRecordedAnewInAnotherMode) {
  EXPECT_THAT(course_of<InTurns>("graphed").said, HasSubstr("is replayed from epoch 0, batch 9 on"));
}

TEST(GraphedStep, BatchesOfOtherSizesRunWithoutAGraph) {
  const Course found = course_of<Plain>("graphed", 1, /*num_samples=*/58);
  expect_equal(found, course_of<Plain>("single_device", 1, 58));
  EXPECT_EQ(count(found.said, "batches of other sizes than the recorded one, as in epoch 0, batch 14"), 1U);
  EXPECT_EQ(count(found.said, "run without a graph"), 1U);
}

struct LogsNumber : Plain {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    log("batch", static_cast<double>(batch_idx));
    return Plain::training_step(batch, batch_idx);
  }
};

struct UpdatesMetric : Plain {
  metrics::Mean mean;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    mean.update(batch["y"]);
    return Plain::training_step(batch, batch_idx);
  }
};

struct LogsText : Plain {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    if (batch_idx == 3) log_text("batch", "the third");
    return Plain::training_step(batch, batch_idx);
  }
};

struct ReadsEpoch : Plain {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return Plain::training_step(batch, batch_idx) * (1.0 + static_cast<double>(current_epoch()));
  }
};

struct HasHook : Plain {
  HasHook() {
    hidden->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.1; });
  }
};

struct SkipsThird : Plain {
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return batch_idx == 3 ? at::Tensor() : Plain::training_step(batch, batch_idx);
  }
};

template <class M>
void expect_runs_without_graph(const std::string& reason) {
  const Course found = course_of<M>("graphed");
  expect_equal(found, course_of<M>("single_device"));
  EXPECT_EQ(count(found.said, "cannot be recorded, and runs without a graph: " + reason), 1U) << found.said;
  EXPECT_EQ(count(found.said, "was recorded"), 0U);
}

TEST(GraphedStep, WhatTheHostWouldHaveToDoAgainIsNamed) {
  expect_runs_without_graph<LogsNumber>("log('batch') takes a number of the host, which no replay changes");
  expect_runs_without_graph<UpdatesMetric>("the metric Mean is updated, which no replay does");
  expect_runs_without_graph<SkipsThird>("training_step skips the batch");
  expect_runs_without_graph<LogsText>("'batch' is sent to the loggers, which no replay does");
  expect_runs_without_graph<ReadsEpoch>("the run's state is read, such as current_epoch()");
  expect_runs_without_graph<HasHook>("a parameter has a hook");
}

struct CountsCalls : LogsNumber {
  int64_t num_calls = 0;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    ++num_calls;
    return LogsNumber::training_step(batch, batch_idx);
  }
};

// A recording that fails computes nothing, so that what the step has put into members would be without values.
TEST(GraphedStep, IsRefusedBeforeItIsRecorded) {
  const auto module = make_module<CountsCalls>();
  const TrainerOptions options = testing::quiet({.strategy = "graphed", .max_steps = 8});
  Trainer(options).fit(module, {.train = testing::tiny_loader()});
  EXPECT_EQ(module->num_calls, 8);
}

struct WritesParameter : Plain {
  at::Tensor scale = register_parameter("scale", torch::ones({4}), /*requires_grad=*/false);
  std::vector<int64_t> versions{};

  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    scale.mul_(0.5);
    return Plain::training_step(batch, batch_idx);
  }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t) override { versions.push_back(scale._version()); }
};

// By its version a strategy sees that a parameter was written.
TEST(GraphedStep, AWriteToAParameterIsSeenInEachReplay) {
  const auto module = make_module<WritesParameter>();
  const TrainerOptions options = testing::quiet({.strategy = "graphed_emptily", .max_steps = 8});
  Trainer(options).fit(module, {.train = testing::tiny_loader()});
  ASSERT_EQ(module->versions.size(), 8U);
  for (size_t i = 1; i < module->versions.size(); ++i) EXPECT_GT(module->versions[i], module->versions[i - 1]) << i;
}

struct Manual : Plain {
  Manual() { automatic_optimization = false; }
};

template <class Error>
std::string message_with_graph(const std::shared_ptr<Plain>& module, TrainerOptions options) {
  options.cuda_graph = true;
  return testing::message_of<Error>(
      [&] { Trainer(testing::quiet(options)).fit(module, {.train = testing::tiny_loader()}); });
}

TEST(GraphedStep, WhatHasNoGraphIsAnErrorBeforeTraining) {
  EXPECT_THAT(message_with_graph<UsageError>(make_module<Plain>(), {.strategy = "dp", .devices = 2}),
              HasSubstr("use 'ddp'"));
  EXPECT_THAT(message_with_graph<UsageError>(make_module<Plain>(), {.precision = "16-mixed"}),
              HasSubstr("write precision = 'bf16-mixed'"));
  EXPECT_THAT(message_with_graph<SetupError>(make_module<Manual>(), {}), HasSubstr("Manual calls backward itself"));
}

TEST(GraphedStep, ACpuHasNoGraphsWhichAMessageSays) {
  TrainerOptions options = testing::quiet({.max_steps = 1});
  options.cuda_graph = true;
  ::testing::internal::CaptureStderr();
  Trainer(options).fit(make_module<Plain>(), {.train = testing::tiny_loader()});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("cuda_graph has no effect on a CPU"));
}

}  // namespace
}  // namespace fulgur
