// When fit ends: bounds, minimum bounds, and requested stops.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/ranks.h"
#include "fulgur/core/run_state.h"
#include "fulgur/loops/fit_bounds.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/at_batch_end.h"
#include "tests/testing/counting_module.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

using namespace std::chrono_literals;
using testing::at_batch_end;
using testing::CountingModule;
using ::testing::HasSubstr;
using testing::quiet;
using testing::stop_at_batch;
using testing::tiny_loader;

struct Ended {
  int64_t epochs, steps, batches;
  bool operator==(const Ended&) const = default;
  friend void PrintTo(const Ended& ended, std::ostream* out) {
    *out << ended.epochs << " epochs, " << ended.steps << " steps, " << ended.batches << " batches";
  }
};

Ended fit(TrainerOptions options) {
  Trainer trainer(quiet(std::move(options)));
  const auto module = make_module<CountingModule>();
  trainer.fit(module, {.train = tiny_loader(40, 8)});  // 5 batches
  return {trainer.state().epoch, trainer.state().global_step, module->trained};
}

TEST(FitBounds, MaxStepsCountsStepsOfTheOptimizer) {
  EXPECT_EQ(fit({.max_steps = 2, .accumulate_grad_batches = 2}), (Ended{1, 2, 4}));
}

TEST(FitBounds, NoStepsOrEpochsAreNoTraining) {
  EXPECT_EQ(fit({.max_steps = 0}), (Ended{0, 0, 0}));
  EXPECT_EQ(fit({.max_epochs = 0}), (Ended{0, 0, 0}));
}

TEST(FitBounds, TheFirstThatIsReachedEndsFit) {
  EXPECT_EQ(fit({.max_epochs = 1, .max_steps = 7}), (Ended{1, 5, 5}));
  EXPECT_EQ(fit({.max_epochs = 9, .max_steps = 7}), (Ended{2, 7, 7}));
}

TEST(FitBounds, MinEpochsWinsOverAStop) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 2, .callbacks = {stop_at_batch(1)}}), (Ended{2, 10, 10}));
}

TEST(FitBounds, MinStepsWinsOverAStop) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_steps = 7, .callbacks = {stop_at_batch(1)}}), (Ended{2, 7, 7}));
}

TEST(FitBounds, TheLaterOfTwoMinimaCounts) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 1, .min_steps = 7, .callbacks = {stop_at_batch(1)}}), (Ended{2, 7, 7}));
  EXPECT_EQ(fit({.max_epochs = 9, .min_epochs = 2, .min_steps = 3, .callbacks = {stop_at_batch(1)}}),
            (Ended{2, 10, 10}));
}

TEST(FitBounds, AMaximumWinsOverAMinimum) {
  EXPECT_EQ(fit({.max_steps = 3, .min_steps = 7}), (Ended{1, 3, 3}));
  EXPECT_EQ(fit({.max_epochs = 1, .min_epochs = 2}), (Ended{1, 5, 5}));
}

TEST(FitBounds, AStopAfterTheMinimaIsHeardAtOnce) {
  EXPECT_EQ(fit({.max_epochs = 9, .min_steps = 2, .callbacks = {stop_at_batch(4)}}), (Ended{1, 4, 4}));
}

TEST(FitBounds, AStopWaitsForTheEndOfTheWindow) {
  EXPECT_EQ(fit({.max_epochs = 9, .accumulate_grad_batches = 3, .callbacks = {stop_at_batch(1)}}), (Ended{1, 1, 3}));
}

TEST(FitBounds, AStopBeforeTrainingTrainsNothing) {
  struct StopAtStart : Callback {
    void on_fit_start(TrainerControl& trainer) override { trainer.request_stop("no need"); }
    void on_train_end(TrainerControl&) override { ended = true; }
    bool ended = false;
  };
  const auto callback = std::make_shared<StopAtStart>();
  EXPECT_EQ(fit({.callbacks = {callback}}), (Ended{0, 0, 0}));
  EXPECT_TRUE(callback->ended);
}

TEST(FitBounds, AStopIsForgottenByTheNextFit) {
  Trainer trainer(quiet({.callbacks = {stop_at_batch(3)}}));
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_EQ(trainer.state().global_step, 1);  // stop_at_batch requests a stop again at once
}

TEST(FitBounds, AStopThatAFailedFitWasAskedForIsForgotten) {
  bool fails = true;
  Trainer trainer(quiet({.callbacks = {at_batch_end([&](TrainerControl& run) {
                           if (!std::exchange(fails, false)) return;
                           run.request_stop("the test wants it");
                           throw std::runtime_error("no");
                         })}}));
  const auto fit_again = [&] { trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)}); };
  EXPECT_THROW(fit_again(), std::runtime_error);
  fit_again();
  EXPECT_EQ(trainer.state().global_step, 5);
}

// A thread may request a stop while another is about to call fit.
TEST(FitBounds, AStopBeforeFitEndsThatFit) {
  Trainer trainer(quiet());
  trainer.request_stop("before fit");
  for (const int64_t steps : {0, 5}) {
    trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
    EXPECT_EQ(trainer.state().global_step, steps);
  }
}

TEST(FitBounds, AnotherThreadMayAskForAStop) {
  std::promise<void> is_training, was_asked;
  const auto waits = at_batch_end([&, count = 0](TrainerControl&) mutable {
    if (++count != 2) return;
    is_training.set_value();
    was_asked.get_future().wait();
  });
  Trainer trainer(quiet({.max_epochs = 9, .callbacks = {waits}}));
  std::thread other([&] {
    is_training.get_future().wait();
    trainer.request_stop("another thread wants it");
    was_asked.set_value();
  });
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  other.join();
  EXPECT_EQ(trainer.state().global_step, 2);
}

struct SignalAtEnd : Callback {
  bool was_torn_down = false;
  void on_train_end(TrainerControl&) override { std::raise(SIGTERM); }
  void teardown(TrainerControl&, EntryPoint) override { was_torn_down = true; }
};

TEST(FitBounds, ASignalAfterTheLastStepReachesTheCaller) {
  const auto callback = std::make_shared<SignalAtEnd>();
  const auto module = make_module<CountingModule>();
  Trainer trainer(quiet({.callbacks = {callback}}));
  try {
    trainer.fit(module, {.train = tiny_loader(40, 8)});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InterruptedError& error) {
    EXPECT_EQ(error.exit_code, 128 + SIGTERM);
    EXPECT_THAT(error.what(), HasSubstr("SIGTERM came after the last of 5 steps"));
  }
  EXPECT_TRUE(callback->was_torn_down);
}

TEST(FitBounds, ASignalAfterTheLastStepReachesTheCallerOnEveryRank) {
  std::atomic<int> interrupted = 0;
  EXPECT_THROW(
      testing::run_ranks(2,
                         [&](World&) {
                           Trainer trainer(quiet({.devices = 2, .callbacks = {std::make_shared<SignalAtEnd>()}}));
                           try {
                             trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
                           } catch (const InterruptedError&) {
                             ++interrupted;
                             throw;
                           }
                         }),
      InterruptedError);
  EXPECT_EQ(interrupted, 2);
}

bool is_default(int signal) {
  struct sigaction now{};
  ::sigaction(signal, nullptr, &now);
  return now.sa_handler == SIG_DFL;
}

// Two fits may overlap in two threads.
TEST(SignalWatch, TheLastOfSeveralPutsTheHandlersBack) {
  for (const bool first_ends_first : {true, false}) {
    auto first = std::make_unique<SignalWatch>(true), second = std::make_unique<SignalWatch>(true);
    (first_ends_first ? first : second).reset();
    const auto& left = first_ends_first ? second : first;
    ASSERT_FALSE(is_default(SIGTERM));
    ASSERT_FALSE(is_default(SIGINT));
    std::raise(SIGTERM);
    EXPECT_EQ(left->pending(), SIGTERM);
    first.reset();
    second.reset();
    EXPECT_TRUE(is_default(SIGTERM));
    EXPECT_TRUE(is_default(SIGINT));
  }
}

// Each fit waits in its second batch until the other one has come to the same batch.
TEST(SignalWatch, TwoFitsAtOnceTrainAsAloneAndPutTheHandlersBack) {
  struct Meets : testing::TinyModule {
    std::barrier<>* meeting = nullptr;
    at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
      if (meeting != nullptr && batch_idx == 1) meeting->arrive_and_wait();
      return TinyModule::training_step(batch, batch_idx);
    }
  };
  const auto fit = [](const std::shared_ptr<Meets>& module, size_t max_epochs) {
    Trainer(quiet({.max_epochs = static_cast<int64_t>(max_epochs)})).fit(module, {.train = tiny_loader()});
  };
  std::array<std::shared_ptr<Meets>, 2> alone, at_once;
  for (size_t i = 0; i < 2; ++i) {
    for (auto* modules : {&alone, &at_once}) {
      seed_everything(i);
      (*modules)[i] = make_module<Meets>();
    }
    fit(alone[i], 1 + i);  // one of the two fits ends later
  }
  std::barrier meeting(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; ++i) {
    at_once[i]->meeting = &meeting;
    threads.emplace_back([&, i] {
      fit(at_once[i], 1 + i);
      meeting.arrive_and_drop();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(at_once[i]->train_losses, alone[i]->train_losses) << i;
  EXPECT_TRUE(is_default(SIGTERM));
  EXPECT_TRUE(is_default(SIGINT));
}

TEST(SignalWatch, AFurtherOneKeepsWhatCameAndTheNextRunBeginsWithoutIt) {
  {
    const SignalWatch first(true);
    std::raise(SIGTERM);
    const SignalWatch second(true), passive(false);
    EXPECT_EQ(first.pending(), SIGTERM);
    EXPECT_EQ(second.pending(), SIGTERM);
    EXPECT_EQ(passive.pending(), 0);
  }
  EXPECT_EQ(SignalWatch(true).pending(), 0);
}

TEST(SignalWatch, LeavesASignalToTheProgramThatHandlesIt) {
  struct sigaction own{}, before{};
  own.sa_handler = SIG_IGN;
  ::sigaction(SIGTERM, &own, &before);
  {
    const SignalWatch watch(true);
    std::raise(SIGTERM);
    EXPECT_EQ(watch.pending(), 0);
    EXPECT_FALSE(is_default(SIGINT));
  }
  EXPECT_TRUE(is_default(SIGINT));
  ::sigaction(SIGTERM, &before, &own);
  EXPECT_EQ(own.sa_handler, SIG_IGN);
}

// Counts the exchanges; the other rank always sends the same as this one.
struct TwoRanks final : Ranks {
  int64_t exchanges = 0;
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return 2; }
  void all_reduce(std::span<double>, Reduction) override { ++exchanges; }
  MetricStates combine(MetricStates states) override { return states; }
  std::vector<std::string> all_gather(std::string_view text) override { return {2, std::string(text)}; }
};

TEST(SignalPoll, SeveralRanksExchangeLittleAndHearOfASignal) {
  const LoopPlan plan;
  const RunState state;
  const StopRequest stop;
  TwoRanks ranks;
  const SignalWatch signals(true);
  FitBounds bounds(plan, state, stop, ranks, signals, FitBounds::Clock::now());
  SignalPoll poll(bounds, ranks);
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(poll());
  EXPECT_LT(ranks.exchanges, 200);
  std::raise(SIGTERM);
  bool is_heard = false;
  for (int i = 0; i < 2000 && !is_heard; ++i) is_heard = poll();
  EXPECT_TRUE(is_heard);
}

TEST(FitBounds, MaxTimeEndsFit) { EXPECT_EQ(fit({.max_epochs = 9, .max_time = 0s}), (Ended{0, 0, 0})); }

TEST(FitBounds, MaxTimeCountsFromTheStart) {
  const LoopPlan plan{.max_time = 1h};
  const RunState state;
  const StopRequest stop;
  TwoRanks ranks;
  const SignalWatch signals(false);
  const auto now = FitBounds::Clock::now();
  EXPECT_TRUE(FitBounds(plan, state, stop, ranks, signals, now - 2h).wants_stop());
  EXPECT_FALSE(FitBounds(plan, state, stop, ranks, signals, now).wants_stop());
}

TEST(FitBounds, MinimaWinOverMaxTimeWhichBoundsNoEpochs) {
  EXPECT_EQ(fit({.min_steps = 12, .max_time = 0s}), (Ended{3, 12, 12}));
  EXPECT_EQ(fit({.min_epochs = 3, .max_time = 0s}), (Ended{3, 15, 15}));
}

TEST(FitBounds, MaxTimeMayBeAnyTime) {
  EXPECT_EQ(fit({.max_epochs = 1, .max_time = "99:00:00:00"}), (Ended{1, 5, 5}));
  EXPECT_EQ(fit({.max_epochs = 1, .max_time = std::chrono::hours::max()}), (Ended{1, 5, 5}));
}

TEST(FitBounds, WithoutAnyThereAreAThousandEpochsAndAWarning) {
  TrainerOptions options = quiet({.callbacks = {stop_at_batch(1)}});
  options.max_epochs = std::nullopt;
  Trainer trainer(options);
  ::testing::internal::CaptureStderr();
  trainer.fit(make_module<CountingModule>(), {.train = tiny_loader(40, 8)});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("neither max_epochs, max_steps nor max_time is set"));
  EXPECT_EQ(trainer.state().max_epochs, 1000);
}

}  // namespace
}  // namespace fulgur
