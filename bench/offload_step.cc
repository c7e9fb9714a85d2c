// What a step of zero_offload and of delayed_update costs on a CPU, where one thread computes the step and one the
// update, for updates that take from a small part of the time of forward and backward to somewhat more than all of it.
// For comparison, the synchronous step with both cores for everything. An MLP of 4 M parameters in 8 buckets, AdamW.
// Large batches make forward and backward longer. Tables that enter the loss by their mean make the update longer, most
// of all in 16-bit precision, where backward moves half the bytes and the update nearly the same number.
//   ./bazelw run //bench:offload_step [-- rounds]
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdlib>
#include <memory>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

constexpr int64_t kSteps = 10;  // per turn
constexpr int64_t kWidth = 720;
constexpr int64_t kLayers = 8;
constexpr double kBucketMib = 2.1;  // one layer

struct Mlp : Module {
  torch::nn::Sequential layers;
  std::vector<at::Tensor> tables;
  explicit Mlp(int64_t num_tables) {
    using namespace torch::nn;
    for (int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(Linear(kWidth, kWidth));
      layers->push_back(ReLU());
    }
    register_module("layers", layers);
    for (int64_t i = 0; i < num_tables; ++i)
      tables.push_back(register_parameter(fmt::format("table{}", i), torch::zeros({kWidth, kWidth})));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    at::Tensor loss = torch::nn::functional::mse_loss(layers->forward(batch["x"]), batch["x"]);
    for (const at::Tensor& table : tables) loss = loss + table.mean();
    return loss;
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-5}); }
};

struct Load {
  int64_t batch_size = 1;
  int64_t num_tables = 0;
  const char* precision = "32";
};

// Drives a strategy with a model of its own, as a Trainer would.
class Steps {
 public:
  Steps(const StrategyChoice& choice, int num_threads, const Load& load)
      : num_threads_(num_threads), strategy_(choice.make("auto")) {
    at::set_num_threads(num_threads);
    seed_everything(1);
    module_ = make_module<Mlp>(load.num_tables);
    strategy_->setup(*module_, {.devices = {c10::kCPU}, .precision = Precision(load.precision), .world = alone_});
    strategy_->setup_optimizers(module_->configure_optimizers());
    batch_ = strategy_->to_device({{"x", torch::randn({load.batch_size, kWidth})}});
  }
  ~Steps() { strategy_->teardown(); }

  void forward_and_backward() {
    at::set_num_threads(num_threads_);
    const at::Tensor loss = strategy_->training_step(batch_, 0);
    strategy_->zero_grad(0);
    strategy_->backward(loss, /*is_last=*/true);
    strategy_->end_micro_batch({.micro_batches = 1}, /*is_last=*/true);
  }
  void update() { strategy_->optimizer_step(0, {}); }
  void run() {
    for (int64_t i = 0; i < kSteps; ++i) {
      forward_and_backward();
      update();
    }
  }

 private:
  int num_threads_;
  World alone_;
  std::unique_ptr<Strategy> strategy_;
  std::shared_ptr<Mlp> module_;
  Batch batch_;
};

void compare(const Load& load, int rounds) {
  Steps one_thread("single_device", 1, load);
  Steps offload(ZeroOffload{.host = {.update_threads = 1}, .ranks = {.bucket_cap_mib = kBucketMib}}, 1, load);
  const auto late = [&](const char* predict) {
    return DelayedUpdate{
        .predict = predict, .warmup_steps = 0, .host = {.update_threads = 1}, .ranks = {.bucket_cap_mib = kBucketMib}};
  };
  Steps delayed(late("gradient"), 1, load), unpredicted(late("none"), 1, load);
  Steps both_cores("single_device", 2, load);
  one_thread.run();  // allocates the gradients
  const std::vector<bench::Contender> contenders{{"zero_offload", [&] { offload.run(); }},
                                                 {"delayed_update", [&] { delayed.run(); }},
                                                 {"delayed_update, unpredicted", [&] { unpredicted.run(); }},
                                                 {"single_device, one thread", [&] { one_thread.run(); }},
                                                 {"single_device, both cores", [&] { both_cores.run(); }},
                                                 {"forward and backward alone",
                                                  [&] {
                                                    for (int64_t i = 0; i < kSteps; ++i)
                                                      one_thread.forward_and_backward();
                                                  }},
                                                 {"the fused update alone", [&] {
                                                    for (int64_t i = 0; i < kSteps; ++i) one_thread.update();
                                                  }}};
  fmt::print("batches of {}, {} tables, precision {}\n", load.batch_size, load.num_tables, load.precision);
  const auto timings = bench::side_by_side("step", kSteps, contenders, rounds);
  const double compute = timings[5].seconds, update = timings[6].seconds;
  const bench::Ratio over_unpredicted = bench::ratio_of(timings[1], timings[2]);
  fmt::print(
      "update / (forward and backward) {:.2f}: delayed_update {:.2f} times as fast as zero_offload (both cores for "
      "everything: {:.2f}), and {:.3f} of the step without prediction (rounds: {:.3f} .. {:.3f}); "
      "zero_offload's exposed update is {:.2f} of the fused one\n\n",
      update / compute, 1 / timings[1].ratio, 1 / timings[4].ratio, over_unpredicted.median, over_unpredicted.least,
      over_unpredicted.most, (timings[0].seconds - compute) / update);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  for (const Load& load :
       {Load{.num_tables = 96, .precision = "bf16-true"}, {.num_tables = 48}, {}, {4}, {16}, {48}, {192}}) {
    compare(load, rounds);
  }
}
