// The step of a strategy with ranks on this host's cores, for bench/python_ddp.py and bench/python_sharded.py, which
// run it side by side with Python's:
//   ddp_step --devices=2 --width=1152 --steps=40 --strategy=ddp
// Weights and batches come from the same formulas as there. Rank 0 prints the losses, and then microseconds per step,
// seconds from the start of the program to the end of the first step, and MB of memory: after the last step (PSS) and
// at the peak (RSS).
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <string>

#include "bench/process_memory.h"
#include "fulgur.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

const Clock::time_point g_start = Clock::now();
constexpr int64_t kBatchSize = 32;  // per rank
constexpr int64_t kWarmUp = 5;      // steps that are not timed
constexpr int64_t kPool = 8;        // different batches

struct StepOptions {
  TrainerOptions trainer{.accelerator = "cpu", .max_epochs = 1, .barebones = true};
  int64_t width = 56;
  int64_t depth = 3;
  int64_t steps = 200;
  bool two_groups = false;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "width", .help = "width of each hidden layer", .min = 1}, &width);
    visit({.name = "depth", .help = "number of hidden layers", .min = 1}, &depth);
    visit({.name = "steps", .help = "number of timed steps", .min = 1}, &steps);
    visit({.name = "two_groups", .help = "put the biases into a parameter group before that of the weights"},
          &two_groups);
  }
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Mlp : public Module {
 public:
  Mlp(int64_t width, int64_t depth, bool two_groups) : two_groups_(two_groups) {
    using namespace torch::nn;
    layers_ = register_module("layers", Sequential());
    for (int64_t i = 0; i < depth; ++i) {
      layers_->push_back(Linear(width, width));
      layers_->push_back(ReLU());
    }
    layers_->push_back(Linear(width, 2));
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      const at::Tensor i = torch::arange(parameter.numel(), at::kDouble).view(parameter.sizes());
      at::Tensor(parameter).copy_(i.mul(0.37).sin_().div_(std::sqrt(static_cast<double>(width))));
    }
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor loss = torch::nn::functional::cross_entropy(layers_->forward(batch["x"]), batch["y"]);
    losses_.push_back(loss.item<float>());
    return loss;
  }
  void on_train_batch_end(const at::Tensor&, const Batch&, int64_t batch_idx) override {
    if (batch_idx == 0) first_step_s_ = seconds_since(g_start);
    if (batch_idx + 1 == kWarmUp) warm_ = Clock::now();
  }
  void on_train_end() override {
    step_us_ = seconds_since(warm_) * 1e6 / static_cast<double>(run_state().global_step - kWarmUp);
    steady_mb_ = bench::proportional_mb();
    peak_mb_ = bench::peak_mb();
  }
  Optimizers configure_optimizers() override {
    if (!two_groups_) return optim::Adam(parameters(), {.lr = 1e-4});
    ParamGroup biases, weights;
    for (const at::Tensor& parameter : parameters())
      (parameter.dim() == 1 ? biases : weights).params.push_back(parameter);
    return optim::Adam(std::vector<ParamGroup>{biases, weights}, {.lr = 1e-4});
  }

  void print() const {
    fmt::print("{:.8g}\n", fmt::join(losses_, " "));
    fmt::print("{:.1f} {:.3f} {:.2f} {:.2f}\n", step_us_, first_step_s_, steady_mb_, peak_mb_);
  }

 private:
  const bool two_groups_;
  torch::nn::Sequential layers_;
  std::vector<float> losses_;
  Clock::time_point warm_;
  double first_step_s_ = 0, step_us_ = 0, steady_mb_ = 0, peak_mb_ = 0;
};

// Yields the same few batches again and again, as Python's loops do.
class Pool final : public Loader {
 public:
  Pool(int64_t width, int64_t num_batches) : width_(width), num_batches_(num_batches) { make_batches(0); }
  void begin_epoch(int64_t) override { given_ = 0; }
  std::optional<Batch> next() override {
    return given_ < num_batches_ ? std::optional(batches_[static_cast<size_t>(given_++ % kPool)]) : std::nullopt;
  }
  std::optional<int64_t> num_batches() const override { return num_batches_; }
  bool set_shard(const DataShard& shard) override {
    make_batches(shard.rank);
    return true;
  }

 private:
  void make_batches(int64_t rank) {
    batches_.clear();
    for (int64_t i = 0; i < kPool; ++i) {
      const at::Tensor angle = torch::arange(kBatchSize * width_, at::kDouble).mul(0.011 * static_cast<double>(i + 1));
      const at::Tensor x = angle.add(rank).sin().to(at::kFloat).view({kBatchSize, width_});
      batches_.push_back({{"x", x}, {"y", x.sum(1).gt(0).to(at::kLong)}});
    }
  }

  std::vector<Batch> batches_;
  int64_t width_, num_batches_, given_ = 0;
};

void run(StepOptions options) {
  at::set_num_threads(1);
  const auto module = make_module<Mlp>(options.width, options.depth, options.two_groups);
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = std::make_shared<Pool>(options.width, options.steps + kWarmUp)});
  if (trainer.is_global_zero()) module->print();
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
