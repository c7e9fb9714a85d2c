// What the Trainer costs: its step against a hand-written loop over the same batches with the same fused kernel; what a
// logged value costs; and what the default callbacks cost, which write to a temporary folder. With a program of the
// same network and its compiled step, as bench/compiled_step.py makes it, a step of that, too, and the code as
// torch's own loader runs it, with the update of its parameters; what the first takes longer is the Trainer's own part.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:trainer_step [-- rounds [program.pt2]]
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>
#include <fmt/format.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "bench/side_by_side.h"
#include "fulgur.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;

constexpr int64_t kSteps = 3000;  // per fit
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

struct CompiledMlp : Module {
  nn::Program net{nullptr};
  explicit CompiledMlp(const std::string& file) { net = register_module("net", nn::Program(file)); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor value = net->forward(batch)["loss"];
    log("train_loss", value, {.prog_bar = true});
    return value;
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = kLr}); }
};

// A step of next to no work, so that the cost of logging shows.
struct OneWeight : Module {
  at::Tensor weight;
  std::vector<std::string> names;  // metrics under which the loss is logged
  explicit OneWeight(int num_logged) : weight(register_parameter("weight", torch::ones({1}))) {
    for (int i = 0; i < num_logged; ++i) names.push_back(fmt::format("train_loss_{}", i));
  }
  at::Tensor training_step(const Batch&, int64_t) override {
    const at::Tensor loss = weight.square();
    for (const std::string& name : names) log(name, loss);
    return loss;
  }
  Optimizers configure_optimizers() override { return optim::Adam(parameters(), {.lr = kLr}); }
};

// The time of a step when nothing disturbs it: the 5th percentile of the times of blocks of steps. begin_step() is to
// be called at the beginning of each step.
class UndisturbedStep {
 public:
  void begin_step(int64_t i) {
    if (i % kBlock != 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (i > 0) blocks_.push_back(std::chrono::duration<double>(now - begin_).count() / kBlock);
    begin_ = now;
  }
  double seconds() {
    const auto percentile = blocks_.begin() + std::ssize(blocks_) / 20;
    std::ranges::nth_element(blocks_, percentile);
    return *percentile;
  }

 private:
  static constexpr int64_t kBlock = 50;
  std::chrono::steady_clock::time_point begin_{};
  std::vector<double> blocks_{};
};

std::vector<Batch> make_pool() {
  std::vector<Batch> pool;
  for (int64_t i = 0; i < kPool; ++i) {
    pool.push_back({{"x", torch::randn({kBatchSize, 32})}, {"y", torch::randint(0, 2, {kBatchSize})}});
  }
  return pool;
}

// Yields the pool over and over, kSteps batches per epoch.
class PoolLoader : public Loader {
 public:
  explicit PoolLoader(const std::vector<Batch>& pool, UndisturbedStep* timer = nullptr) : pool_(pool), timer_(timer) {}
  void begin_epoch(int64_t) override { next_ = 0; }
  std::optional<Batch> next() override {
    if (next_ == kSteps) return std::nullopt;
    if (timer_ != nullptr) timer_->begin_step(next_);
    return pool_[static_cast<size_t>(next_++ % kPool)];
  }
  std::optional<int64_t> num_batches() const override { return kSteps; }

 private:
  const std::vector<Batch>& pool_;
  UndisturbedStep* timer_;
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

// The compiled step by torch's own loader, which has unpacked it before, and fulgur's Adam kernel on each parameter.
// Each run begins with the weights of the file, as the Trainer's does, so that both compute with numbers alike.
class CodeAndUpdate {
 public:
  explicit CodeAndUpdate(const std::string& file) : file_(file), code_(file, "step", /*run_single_threaded=*/true) {}

  void run(const std::vector<Batch>& pool, UndisturbedStep& timer) {
    const nn::Program program(file_, nn::ProgramOptions{.compiled = false});
    const std::vector<at::Tensor> params = program->parameters();
    const std::vector<std::string> names = program->input_names();
    std::vector<at::Tensor> exp_avgs, exp_avg_sqs;
    for (const at::Tensor& param : params) {
      exp_avgs.push_back(torch::zeros_like(param));
      exp_avg_sqs.push_back(torch::zeros_like(param));
    }
    const c10::NoGradGuard no_grad;
    for (int64_t i = 0; i < kSteps; ++i) {
      timer.begin_step(i);
      const Batch& batch = pool[static_cast<size_t>(i % kPool)];
      std::vector<at::Tensor> inputs = params;
      for (const std::string& name : names) inputs.push_back(batch[name]);
      const std::vector<at::Tensor> results = code_.boxed_run(std::move(inputs));  // the loss, and the gradients
      const auto step = static_cast<double>(i + 1);
      const optim::AdamRule rule{.step_size = kLr / (1 - std::pow(0.9, step)),
                                 .inv_root_bias_correction2 = 1 / std::sqrt(1 - std::pow(0.999, step))};
      for (size_t k = 0; k < params.size(); ++k) {
        const at::Tensor& gradient = results[k + 1];
        optim::fused_update(
            rule, optim::Slice<float>{.param = params[k].data_ptr<float>(),
                                      .grad = gradient.data_ptr(),
                                      .states = {exp_avgs[k].data_ptr<float>(), exp_avg_sqs[k].data_ptr<float>()},
                                      .num_elements = gradient.numel()});
      }
    }
  }

 private:
  std::string file_;
  torch::inductor::AOTIModelPackageLoader code_;
};

template <class Net, class... Args>
void train(const std::shared_ptr<PoolLoader>& loader, TrainerOptions options, Args... args) {
  seed_everything(1);
  options.max_epochs = 1;
  options.accelerator = "cpu";
  Trainer(options).fit(make_module<Net>(args...), {.train = loader});
}
template <class Net, class... Args>
void trained(const std::vector<Batch>& pool, const TrainerOptions& options, Args... args) {
  train<Net>(std::make_shared<PoolLoader>(pool), options, args...);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  at::set_num_threads(1);
  const std::vector<Batch> pool = make_pool();
  const TrainerOptions barebones{.barebones = true};
  const TrainerOptions quiet{
      .enable_progress_bar = false, .enable_model_summary = false, .enable_checkpointing = false, .logger = false};
  const auto folder = std::filesystem::temp_directory_path() / "fulgur_trainer_step";
  std::ofstream nowhere("/dev/null");
  const auto with_defaults = [&] {
    TrainerOptions options{.default_root_dir = folder.string()};
    options.callbacks = {ProgressBar::make({.out = &nowhere}), ModelSummary::make({.out = &nowhere})};
    trained<Mlp>(pool, options);
  };
  std::vector<bench::Contender> loops{{"hand-written loop", [&] { hand_written(pool); }},
                                      {"Trainer, barebones", [&] { trained<Mlp>(pool, barebones); }},
                                      {"Trainer, without callbacks", [&] { trained<Mlp>(pool, quiet); }},
                                      {"Trainer, default callbacks", with_defaults}};
  UndisturbedStep trainer_step, bare_step;
  if (argc > 2) {
    const std::string file = argv[2];
    loops.push_back({"compiled, barebones", [&pool, &trainer_step, barebones, file] {
                       train<CompiledMlp>(std::make_shared<PoolLoader>(pool, &trainer_step), barebones, file);
                     }});
    loops.push_back({"compiled, without callbacks", [&pool, quiet, file] { trained<CompiledMlp>(pool, quiet, file); }});
    const auto alone = std::make_shared<CodeAndUpdate>(file);
    loops.push_back(
        {"compiled code by torch's loader, and update", [&pool, &bare_step, alone] { alone->run(pool, bare_step); }});
  }
  bench::side_by_side("step", kSteps, loops, rounds);
  if (argc > 2) {
    fmt::print(
        "undisturbed: compiled, barebones {:.2f} us, by torch's loader {:.2f} us, the Trainer's own part {:.2f} us\n",
        trainer_step.seconds() * 1e6, bare_step.seconds() * 1e6, (trainer_step.seconds() - bare_step.seconds()) * 1e6);
  }
  std::filesystem::remove_all(folder);
  const std::vector<bench::Contender> logging{
      {"one weight, nothing logged", [&] { trained<OneWeight>(pool, quiet, 0); }},
      {"one weight, 1 logged value", [&] { trained<OneWeight>(pool, quiet, 1); }},
      {"one weight, 10 logged values", [&] { trained<OneWeight>(pool, quiet, 10); }}};
  const auto timings = bench::side_by_side("step", kSteps, logging, rounds);
  fmt::print("a logged value: {:.2f} us\n", (timings[2].seconds - timings[0].seconds) / 10 * 1e6);
}
