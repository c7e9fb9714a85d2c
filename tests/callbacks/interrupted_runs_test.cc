// Callbacks that decide by what they have seen: a run that was interrupted after any step, or at the end of any epoch,
// and resumed decides as the run that was not.
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <ranges>
#include <string>
#include <tuple>
#include <vector>

#include "fulgur/callbacks/backbone_finetuning.h"
#include "fulgur/callbacks/divergence_guard.h"
#include "fulgur/callbacks/early_stopping.h"
#include "fulgur/callbacks/weight_averaging.h"
#include "fulgur/optim/adam.h"
#include "fulgur/optim/lr_schedulers.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"
#include "tests/testing/without_warmup.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

// Saves a checkpoint after every batch and epoch, and keeps what loggers get.
class Recorder final : public Callback {
 public:
  explicit Recorder(fs::path folder) : folder_(std::move(folder)) {}
  std::vector<std::tuple<int64_t, std::string, double>> metrics;
  std::map<std::string, size_t> metrics_before;  // by checkpoint: the size of `metrics` when it was written

  void on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (!folder_.empty()) trainer.save_checkpoint(folder_ / c10::str(trainer.state().epoch, "-", batch_idx));
  }
  void on_train_epoch_end(TrainerControl& trainer) override {
    if (!folder_.empty()) trainer.save_checkpoint(folder_ / c10::str(trainer.state().epoch, "-end"));
  }
  void on_metrics(TrainerControl&, const Metrics& values, int64_t step) override {
    for (const auto& [name, value] : values) metrics.emplace_back(step, name, value);
  }
  void on_checkpoint_saved(TrainerControl&, const fs::path& folder) override {
    metrics_before[folder.filename()] = metrics.size();
  }

 private:
  fs::path folder_;
};

struct Trail {
  int64_t global_step = 0;
  std::vector<at::Tensor> weights;
  std::vector<std::tuple<int64_t, std::string, double>> metrics;
  std::map<std::string, size_t> metrics_before;  // by checkpoint
};

struct Case {
  std::function<std::shared_ptr<Callback>()> make;
  TrainerOptions options{};
  int64_t world_size = 1;
  bool goes_back = false;  // to the newest checkpoint, so that a run that resumes writes them, too
  std::function<std::shared_ptr<testing::TinyModule>()> make_model = [] { return make_module<testing::TinyModule>(); };
  std::function<std::shared_ptr<Callback>()> make_another{};
};

constexpr int64_t kMostEpochs = 6, kBatches = 3;

Trail fit(const Case& run, uint64_t seed, const fs::path& saved_in, const std::string& ckpt_path) {
  static std::mutex mutex;
  std::shared_ptr<testing::TinyModule> module;
  {
    const std::lock_guard lock(mutex);
    seed_everything(seed);
    module = run.make_model();
  }
  const auto recorder = std::make_shared<Recorder>(saved_in);
  TrainerOptions options = run.options;
  options.max_epochs = kMostEpochs;
  options.log_every_n_steps = 1;
  options.ckpt_path = ckpt_path;
  options.callbacks = {run.make(), recorder};
  if (run.make_another) options.callbacks.push_back(run.make_another());
  if (run.world_size > 1) options.devices = run.world_size;
  Trainer trainer(testing::quiet(options));
  trainer.fit(module, {.train = testing::tiny_loader(4 * kBatches * run.world_size, 4, /*shuffle=*/true),
                       .val = testing::tiny_loader(8 * run.world_size, 4)});
  Trail trail{.global_step = trainer.state().global_step,
              .weights = {},
              .metrics = recorder->metrics,
              .metrics_before = recorder->metrics_before};
  for (const at::Tensor& param : module->parameters()) trail.weights.push_back(param.detach());
  return trail;
}

// The trail of rank 0.
Trail fit_ranks(const Case& run, uint64_t seed, const fs::path& saved_in, const std::string& ckpt_path) {
  if (run.world_size == 1) return fit(run, seed, saved_in, ckpt_path);
  std::vector<Trail> trails(static_cast<size_t>(run.world_size));
  testing::run_ranks(run.world_size, [&](World& world) {
    trails[static_cast<size_t>(world.rank())] = fit(run, seed, saved_in, ckpt_path);
  });
  for (const Trail& trail : trails) EXPECT_EQ(trail.global_step, trails[0].global_step);
  return trails[0];
}

// Resumes from every checkpoint of a run. Returns how many steps the run took.
int64_t expect_same_decisions(const Case& run) {
  const testing::TempDir dir;
  const Trail whole = fit_ranks(run, 1, dir.path(), "");
  int64_t num_resumed = 0;
  for (const auto& checkpoint : fs::directory_iterator(dir.path())) {
    SCOPED_TRACE(checkpoint.path().filename().string());
    const testing::TempDir again;
    const Trail resumed = fit_ranks(run, 2, run.goes_back ? again.path() : fs::path(), checkpoint.path());
    EXPECT_EQ(resumed.global_step, whole.global_step);
    EXPECT_TRUE(std::ranges::equal(resumed.weights, whole.weights,
                                   [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); }));
    const auto sent_before = static_cast<int64_t>(whole.metrics_before.at(checkpoint.path().filename()));
    EXPECT_TRUE(std::ranges::equal(whole.metrics | std::views::drop(sent_before), resumed.metrics));
    ++num_resumed;
  }
  EXPECT_GE(num_resumed, whole.global_step + 1);
  return whole.global_step;
}

TEST(InterruptedRuns, EarlyStoppingStopsAtTheSameStep) {
  for (const int64_t world_size : {1, 2}) {
    for (const int64_t val_check_interval : {3, 1}) {
      SCOPED_TRACE(c10::str(world_size, " ranks, val_check_interval ", val_check_interval));
      const int64_t steps = expect_same_decisions(
          {.make = [] { return EarlyStopping::make({.monitor = "val_loss", .mode = "max", .patience = 4}); },
           .options = {.val_check_interval = Batches(val_check_interval)},
           .world_size = world_size});
      EXPECT_GT(steps, 4);
      EXPECT_LT(steps, kMostEpochs * kBatches);
    }
  }
}

// Has a score that gets worse at first.
struct WithScores : testing::TinyModule {
  void validation_step(const Batch&, int64_t) override {
    constexpr std::array kScores{1.0, 2.0, 3.0, 0.5, 0.4, 0.3};
    log("score", kScores[static_cast<size_t>(current_epoch())]);
  }
};

Case early_stopping_with_minimum(int64_t patience, int64_t min_epochs, int64_t world_size = 1) {
  return {.make = [=] { return EarlyStopping::make({.monitor = "score", .patience = patience}); },
          .options = {.min_epochs = min_epochs},
          .world_size = world_size,
          .make_model = [] { return make_module<WithScores>(); }};
}

// EarlyStopping requests the stop in the third epoch, and has no reason for it any more in the fourth.
TEST(InterruptedRuns, AStopThatWaitsForAMinimumIsNotForgotten) {
  for (const int64_t world_size : {1, 2}) {
    SCOPED_TRACE(c10::str(world_size, " ranks"));
    EXPECT_EQ(expect_same_decisions(early_stopping_with_minimum(/*patience=*/2, /*min_epochs=*/5, world_size)),
              5 * kBatches);
    const auto stop_once = [] {
      return testing::at_batch_end([](TrainerControl& trainer) {
        if (trainer.state().global_step == 4) trainer.request_stop("the test wants it");
      });
    };
    EXPECT_EQ(expect_same_decisions({.make = stop_once, .options = {.min_steps = 8}, .world_size = world_size}), 8);
  }
}

TEST(InterruptedRuns, AStopThatHasWaitedIsForgottenWithOtherOptions) {
  const testing::TempDir dir;
  fit(early_stopping_with_minimum(/*patience=*/2, /*min_epochs=*/5), 1, dir.path(), "");
  const auto epochs = [&](int64_t patience, int64_t min_epochs) {
    const Case run = early_stopping_with_minimum(patience, min_epochs);
    return fit(run, 2, "", dir.path() / "3-end").global_step / kBatches;
  };
  EXPECT_EQ(epochs(/*patience=*/2, /*min_epochs=*/5), 5);
  EXPECT_EQ(epochs(/*patience=*/9, /*min_epochs=*/5), kMostEpochs);
  EXPECT_EQ(epochs(/*patience=*/2, /*min_epochs=*/4), kMostEpochs);
}

// Every third update or so is left out.
TEST(InterruptedRuns, DivergenceGuardSkipsTheSameUpdates) {
  for (const int64_t world_size : {1, 2}) {
    SCOPED_TRACE(c10::str(world_size, " ranks"));
    std::vector<std::shared_ptr<DivergenceGuard>> guards;
    std::mutex mutex;
    expect_same_decisions({.make =
                               [&] {
                                 const std::lock_guard lock(mutex);
                                 return guards.emplace_back(
                                     DivergenceGuard::make({.max_loss_z = 0.5, .max_norm_z = 0.5, .window_size = 3}));
                               },
                           .world_size = world_size});
    EXPECT_GT(guards.front()->num_found(), 2);
  }
}

TEST(InterruptedRuns, DivergenceGuardGoesBackToTheSameCheckpoints) {
  for (const char* strategy : {"ddp", "zero_offload"}) {
    for (const int64_t world_size : {1, 2}) {
      SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks"));
      std::vector<std::shared_ptr<DivergenceGuard>> guards;
      std::mutex mutex;
      expect_same_decisions(
          {.make =
               [&] {
                 const std::lock_guard lock(mutex);
                 return guards.emplace_back(DivergenceGuard::make(
                     {.action = "rollback", .max_loss_z = 0.5, .max_norm_z = 0.5, .window_size = 3, .lr_factor = 0.7}));
               },
           .options = {.strategy = strategy},
           .world_size = world_size,
           .goes_back = true});
      EXPECT_GT(guards.front()->num_found(), 1);
    }
  }
}

struct WithBackbone : testing::TinyModule {
  Optimizers configure_optimizers() override {
    return {optim::AdamW({{.params = hidden->parameters(), .name = "backbone"}, {.params = out->parameters()}},
                         {.lr = 1e-2}),
            {.scheduler = optim::StepLR::make({.step_size = 2, .gamma = 0.7}), .interval = "step"}};
  }
};

TEST(InterruptedRuns, BackboneFinetuningTrainsTheSameGroups) {
  for (const char* strategy : {"ddp", "ddp_sharded", "delayed_update"}) {
    for (const int64_t world_size : {1, 2}) {
      SCOPED_TRACE(c10::str(strategy, ", ", world_size, " ranks"));
      expect_same_decisions(
          {.make = [] { return BackboneFinetuning::make({.unfreeze_at_epoch = 2, .initial_lr_ratio = 0.2}); },
           .options = {.strategy = testing::without_warmup(strategy), .gradient_clip_val = 0.1},
           .world_size = world_size,
           .make_model = [] { return make_module<WithBackbone>(); }});
    }
  }
}

// The last weights are the average, and val_loss is its.
TEST(InterruptedRuns, WeightAveragingAveragesTheSameWeights) {
  for (const char* strategy : {"ddp", "ddp_sharded", "zero_offload", "delayed_update"}) {
    for (const char* precision : {"32", "bf16-true"}) {
      for (const int64_t world_size : {1, 2}) {
        SCOPED_TRACE(c10::str(strategy, ", ", precision, ", ", world_size, " ranks"));
        expect_same_decisions(
            {.make = [] { return WeightAveraging::make({.decay = 0.7, .every_n_steps = 2, .start_step = 1}); },
             .options = {.strategy = testing::without_warmup(strategy), .precision = precision},
             .world_size = world_size});
      }
    }
  }
}

// The last checkpoints before an averaging have weights that are trained, but were never averaged.
TEST(InterruptedRuns, WeightAveragingAveragesTheSameWeightsOfABackboneThatThaws) {
  for (const char* strategy : {"single_device", "zero_offload"}) {
    SCOPED_TRACE(strategy);
    expect_same_decisions(
        {.make = [] { return WeightAveraging::make({.decay = 0.7, .every_n_steps = 4, .start_step = 1}); },
         .options = {.strategy = strategy},
         .make_model = [] { return make_module<WithBackbone>(); },
         .make_another = [] { return BackboneFinetuning::make({.unfreeze_at_epoch = 2, .initial_lr_ratio = 0.2}); }});
  }
}

TEST(InterruptedRuns, StochasticWeightAveragingAveragesTheSameEpochs) {
  expect_same_decisions(
      {.make = [] { return WeightAveraging::make({.method = "swa", .every_n_steps = 0, .start_epoch = 1}); }});
}

}  // namespace
}  // namespace fulgur
