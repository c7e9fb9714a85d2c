// The step of ddp on this host's cores, for bench/python_ddp.py, which runs it side by side with Python's:
//   ddp_step --devices=2 --width=1152 --steps=40 --strategy=ddp
// Prints "<microseconds of a step> <seconds from the start of main() to the end of the first step>" from rank 0.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>

#include "fulgur.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

const Clock::time_point g_start = Clock::now();
constexpr int64_t kBatchSize = 32;  // of a rank
constexpr int64_t kWarmUp = 5;      // steps

struct StepOptions {
  TrainerOptions trainer{.accelerator = "cpu", .max_epochs = 1, .barebones = true};
  int64_t width = 56;
  int64_t steps = 200;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "width", .help = "of each of the three hidden layers", .min = 1}, &width);
    visit({.name = "steps", .help = "that are timed", .min = 1}, &steps);
  }
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Mlp : public Module {
 public:
  explicit Mlp(int64_t width) {
    using namespace torch::nn;
    layers_ = register_module("layers", Sequential(Linear(width, width), ReLU(), Linear(width, width), ReLU(),
                                                   Linear(width, width), ReLU(), Linear(width, 2)));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::cross_entropy(layers_->forward(batch["x"]), batch["y"]);
  }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (batch_idx == 0) first_step_s_ = seconds_since(g_start);
    if (batch_idx + 1 == kWarmUp) warm_ = Clock::now();
  }
  void on_train_end() override {
    step_us_ = seconds_since(warm_) * 1e6 / static_cast<double>(run_state().global_step - kWarmUp);
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = 1e-4}); }

  void print() const { fmt::print("{:.1f} {:.3f}\n", step_us_, first_step_s_); }

 private:
  torch::nn::Sequential layers_;
  Clock::time_point warm_;
  double first_step_s_ = 0, step_us_ = 0;
};

void run(StepOptions options) {
  at::set_num_threads(1);
  seed_everything(1);
  const int64_t samples =
      (options.steps + kWarmUp) * kBatchSize * std::max<int64_t>(1, *options.trainer.devices.count());
  const at::Tensor pool = torch::randn({64 * kBatchSize, options.width});
  const at::Tensor x = pool.index({torch::arange(samples) % pool.size(0)});
  const auto data = TensorDataset::make({{"x", x}, {"y", torch::randint(0, 2, {samples})}});
  const auto module = make_module<Mlp>(options.width);
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = DataLoader::make(data, {.batch_size = kBatchSize})});
  if (trainer.is_global_zero()) module->print();
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
