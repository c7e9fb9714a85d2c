// What callbacks and loggers cost: a step of a small MLP with and without them; a row of metrics.csv when the file has
// a million rows, and the memory that it takes; WeightAveraging; scalars in a TensorBoard file (bench/python_loggers.py
// compares).
//   OMP_NUM_THREADS=1 ./bazelw run //bench:callbacks_step [-- rounds]
//   callbacks_step scalars <count>     prints the seconds that so many scalars took
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur.h"
#include "tests/testing/fake_trainer_control.h"

namespace {

using namespace fulgur;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int64_t kSteps = 3000;  // per fit
constexpr int64_t kBatchSize = 32;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Mlp : Module {
  torch::nn::Sequential layers{nullptr};
  Mlp() {
    using namespace torch::nn;
    layers = register_module(
        "layers", Sequential(Linear(32, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 2)));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor loss = torch::nn::functional::cross_entropy(layers->forward(batch["x"]), batch["y"]);
    log("train_loss", loss, {.prog_bar = true, .on_step = true, .on_epoch = true});
    return loss;
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = 1e-3}); }
};

// Yields the same batch, some times per epoch.
class OneBatchLoader : public Loader {
 public:
  OneBatchLoader(Batch batch, int64_t count) : batch_(std::move(batch)), count_(count) {}
  void begin_epoch(int64_t) override { left_ = count_; }
  std::optional<Batch> next() override { return left_-- > 0 ? std::optional(batch_) : std::nullopt; }
  std::optional<int64_t> num_batches() const override { return count_; }

 private:
  Batch batch_;
  int64_t count_, left_ = 0;
};

void fit(const std::vector<std::shared_ptr<Callback>>& callbacks, const fs::path& folder, const std::string& profiler) {
  seed_everything(1);
  const auto has = [&]<class Kind>() {
    return std::ranges::any_of(callbacks, [](const auto& c) { return dynamic_cast<Kind*>(c.get()) != nullptr; });
  };
  TrainerOptions options{.max_epochs = 1};
  options.accelerator = "cpu";
  options.default_root_dir = folder;
  options.enable_progress_bar = has.operator()<ProgressBar>();
  options.logger = has.operator()<CSVLogger>();
  options.enable_checkpointing = has.operator()<ModelCheckpoint>();
  options.enable_model_summary = false;
  options.callbacks = callbacks;
  options.profiler = profiler;
  const Batch batch{{"x", torch::randn({kBatchSize, 32})}, {"y", torch::randint(0, 2, {kBatchSize})}};
  Trainer(options).fit(make_module<Mlp>(), {.train = std::make_shared<OneBatchLoader>(batch, kSteps)});
}

void compare_steps(int rounds, const fs::path& folder) {
  std::ofstream nowhere("/dev/null");
  const auto bare = [&] { fit({}, folder, "none"); };
  const auto watched = [&](bool async) {
    fit({ProgressBar::make({.out = &nowhere}), EvaluationTable::make({.out = &nowhere}), CSVLogger::make(),
         TensorBoardLogger::make(), LearningRateMonitor::make(), EarlyStopping::make({.monitor = "train_loss"}),
         ModelCheckpoint::make({.every_n_train_steps = 1000, .async = async})},
        folder, "none");
  };
  const auto measured = [&] { fit({ThroughputMonitor::make(), GradientNormMonitor::make()}, folder, "none"); };
  const auto profiled = [&] {
    std::fflush(stdout);
    const int shown = ::dup(STDOUT_FILENO), hidden = ::fileno(std::fopen("/dev/null", "w"));
    ::dup2(hidden, STDOUT_FILENO);
    fit({}, folder, "simple");
    ::dup2(shown, STDOUT_FILENO);
    ::close(shown);
  };
  bench::side_by_side("step", kSteps,
                      {{"without callbacks", bare},
                       {"bar, loggers, monitors, checkpoints", [&] { watched(false); }},
                       {"the same, checkpoints in the background", [&] { watched(true); }},
                       {"throughput and gradient norm", measured},
                       {"profiler simple", profiled}},
                      rounds);
}

// 20 million parameters in four layers.
struct WideMlp : Module {
  torch::nn::Sequential layers{nullptr};
  WideMlp() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(Linear(kWidth, kWidth), ReLU(), Linear(kWidth, kWidth), ReLU(),
                                                  Linear(kWidth, kWidth), ReLU(), Linear(kWidth, kWidth)));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::mse_loss(layers->forward(batch["x"]), batch["x"]);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-4}); }
  static constexpr int64_t kWidth = 2236;
};

// A fit is short, but its setting up takes less than a step.
void compare_averaging(int rounds, int64_t batch_size) {
  constexpr int64_t kStepsPerFit = 12;
  const Batch batch{{"x", torch::randn({batch_size, WideMlp::kWidth})}};
  const auto loader = std::make_shared<OneBatchLoader>(batch, kStepsPerFit);
  const auto module = make_module<WideMlp>();
  const auto train = [&](bool averages) {
    TrainerOptions options{.max_epochs = 1};
    options.accelerator = "cpu";
    options.enable_progress_bar = options.logger = options.enable_checkpointing = options.enable_model_summary = false;
    if (averages) options.callbacks.push_back(WeightAveraging::make());
    Trainer(options).fit(module, {.train = loader});
  };
  bench::side_by_side("step", kStepsPerFit,
                      {{fmt::format("20 M parameters, batch of {}", batch_size), [&] { train(false); }},
                       {"with WeightAveraging", [&] { train(true); }}},
                      rounds);
}

// The median time of a row, of 500 in a row.
double time_of_row(CSVLogger& logger, testing::FakeTrainerControl& trainer, int64_t& step) {
  std::vector<double> times;
  for (int i = 0; i < 500; ++i) {
    const auto begin = Clock::now();
    logger.on_metrics(trainer, {{"train_loss", 0.5}, {"val_loss", 0.25}}, step++);
    times.push_back(seconds_since(begin));
  }
  std::ranges::nth_element(times, times.begin() + 250);
  return times[250];
}

void write_a_million_rows(const fs::path& folder) {
  testing::FakeTrainerControl trainer(folder);
  CSVLogger logger({.file = folder / "rows.csv"});
  int64_t step = 0;
  while (step < 1000) logger.on_metrics(trainer, {{"train_loss", 0.5}, {"val_loss", 0.25}}, step++);
  const double early = time_of_row(logger, trainer, step);
  const auto bytes_before = ::mallinfo2().uordblks;
  while (step < 1'000'000) logger.on_metrics(trainer, {{"train_loss", 0.5}, {"val_loss", 0.25}}, step++);
  const auto bytes_grown = static_cast<int64_t>(::mallinfo2().uordblks) - static_cast<int64_t>(bytes_before);
  const double late = time_of_row(logger, trainer, step);
  fmt::print("a row of metrics.csv after 10^6 rows: {:.1f} us, {:.2f} times one after 10^3; memory grown by {} bytes\n",
             late * 1e6, late / early, bytes_grown);
}

void write_scalars(int64_t count, const fs::path& folder) {
  testing::FakeTrainerControl trainer(folder);
  TensorBoardLogger logger;
  const auto begin = Clock::now();
  for (int64_t step = 0; step < count; ++step) logger.on_metrics(trainer, {{"train_loss", 0.5}}, step);
  logger.teardown(trainer, EntryPoint::fit);
  fmt::print("{}\n", seconds_since(begin));
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const fs::path folder = fs::temp_directory_path() / fmt::format("fulgur_callbacks_step_{}", ::getpid());
  fs::create_directories(folder);
  if (argc > 2 && argv[1] == std::string_view("scalars")) {
    write_scalars(std::atoll(argv[2]), folder);
  } else {
    compare_steps(argc > 1 ? std::atoi(argv[1]) : 15, folder);
    for (const int64_t batch_size : {32, 128}) compare_averaging(argc > 1 ? std::atoi(argv[1]) : 7, batch_size);
    write_a_million_rows(folder);
  }
  fs::remove_all(folder);
}
