// What the Trainer costs: its step against a hand-written loop over the same batches with the same fused kernel.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:trainer_step
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>

#include <filesystem>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

constexpr int64_t kSteps = 3000;  // of one fit
constexpr int64_t kPool = 64;     // different batches
constexpr int64_t kBatchSize = 32;
constexpr double kLr = 1e-3;

struct Mlp : Module {
  torch::nn::Sequential layers{nullptr};
  Mlp() {
    using namespace torch::nn;
    layers = register_module(
        "layers", Sequential(Linear(32, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 2)));
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) {
    return torch::nn::functional::cross_entropy(layers->forward(x), y);
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = loss(batch["x"], batch["y"]);
    log("train_loss", value, {.prog_bar = true});
    return value;
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = kLr}); }
};

std::vector<Batch> make_pool() {
  std::vector<Batch> pool;
  for (int64_t i = 0; i < kPool; ++i) {
    pool.push_back({{"x", torch::randn({kBatchSize, 32})}, {"y", torch::randint(0, 2, {kBatchSize})}});
  }
  return pool;
}

// The pool, over and over, kSteps batches an epoch.
class PoolLoader : public Loader {
 public:
  explicit PoolLoader(const std::vector<Batch>& pool) : pool_(pool) {}
  void begin_epoch(int64_t) override { next_ = 0; }
  std::optional<Batch> next() override {
    if (next_ == kSteps) return std::nullopt;
    return pool_[static_cast<size_t>(next_++ % kPool)];
  }
  std::optional<int64_t> num_batches() const override { return kSteps; }

 private:
  const std::vector<Batch>& pool_;
  int64_t next_ = 0;
};

void hand_written(const std::vector<Batch>& pool) {
  seed_everything(1);
  Mlp module;
  const std::vector<at::Tensor> params = module.parameters();
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs, steps;
  for (const at::Tensor& param : params) {
    exp_avgs.push_back(torch::zeros_like(param));
    exp_avg_sqs.push_back(torch::zeros_like(param));
    steps.push_back(torch::zeros({}));
  }
  for (int64_t i = 0; i < kSteps; ++i) {
    const Batch& batch = pool[static_cast<size_t>(i % kPool)];
    const at::Tensor loss = module.loss(batch["x"], batch["y"]);
    for (const at::Tensor& param : params) param.mutable_grad().reset();
    loss.backward();
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (const at::Tensor& param : params) grads.push_back(param.grad());
    at::_foreach_add_(steps, 1);
    at::_fused_adam_(params, grads, exp_avgs, exp_avg_sqs, {}, steps, kLr, 0.9, 0.999, 0.0, 1e-8, false, false);
  }
}

void trained(const std::vector<Batch>& pool, TrainerOptions options) {
  seed_everything(1);
  options.max_epochs = 1;
  options.accelerator = "cpu";
  Trainer(options).fit(make_module<Mlp>(), {.train = std::make_shared<PoolLoader>(pool)});
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const std::vector<Batch> pool = make_pool();
  const TrainerOptions quiet{
      .enable_progress_bar = false, .enable_model_summary = false, .enable_checkpointing = false, .logger = false};
  bench::side_by_side("step", kSteps,
                      {{"hand-written loop", [&] { hand_written(pool); }}, {"Trainer", [&] { trained(pool, quiet); }}});
}
