// What callbacks and loggers cost: a step of a small MLP with and without them; a row of metrics.csv when the file has
// a million rows, and the memory that it takes; scalars in a TensorBoard file (bench/python_loggers.py compares).
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

// Yields the same batch, kSteps times per epoch.
class OneBatchLoader : public Loader {
 public:
  void begin_epoch(int64_t) override { left_ = kSteps; }
  std::optional<Batch> next() override { return left_-- > 0 ? std::optional(batch_) : std::nullopt; }
  std::optional<int64_t> num_batches() const override { return kSteps; }

 private:
  Batch batch_{{"x", torch::randn({kBatchSize, 32})}, {"y", torch::randint(0, 2, {kBatchSize})}};
  int64_t left_ = 0;
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
  Trainer(options).fit(make_module<Mlp>(), {.train = std::make_shared<OneBatchLoader>()});
}

void compare_steps(int rounds, const fs::path& folder) {
  std::ofstream nowhere("/dev/null");
  const auto bare = [&] { fit({}, folder, "none"); };
  const auto watched = [&] {
    fit({ProgressBar::make({.out = &nowhere}), EvaluationTable::make({.out = &nowhere}), CSVLogger::make(),
         TensorBoardLogger::make(), LearningRateMonitor::make(), EarlyStopping::make({.monitor = "train_loss"}),
         ModelCheckpoint::make({.every_n_train_steps = 1000})},
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
                       {"bar, loggers, monitors, checkpoints", watched},
                       {"throughput and gradient norm", measured},
                       {"profiler simple", profiled}},
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
    write_a_million_rows(folder);
  }
  fs::remove_all(folder);
}
