// What toggle_optimizer costs or saves: a step of a GAN with the guard in the generator's and the discriminator's half,
// over the same step without it. With the guard, backward computes no gradients for the network that does not learn.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:toggle_step [-- rounds]
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

constexpr int64_t kSteps = 100;  // per fit
constexpr int64_t kBatchSize = 32;
constexpr int64_t kSamples = 256;

torch::nn::Sequential mlp(int64_t in, int64_t width, int64_t out) {
  using namespace torch::nn;
  return Sequential(Linear(in, width), ReLU(), Linear(width, width), ReLU(), Linear(width, out));
}

struct Gan : Module {
  torch::nn::Sequential generator{nullptr}, discriminator{nullptr};
  const bool guards;

  Gan(int64_t width, bool with_guard) : guards(with_guard) {
    automatic_optimization = false;
    generator = register_module("generator", mlp(16, width, 64));
    discriminator = register_module("discriminator", mlp(64, width, 1));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor real = batch["x"];
    const at::Tensor fake = generator->forward(torch::randn({real.size(0), 16}));
    {
      std::optional<ScopedToggle> guard;
      if (guards) guard.emplace(toggle_optimizer(1));
      step(1,
           (discriminator->forward(real) - 1).square().mean() + discriminator->forward(fake.detach()).square().mean());
    }
    std::optional<ScopedToggle> guard;
    if (guards) guard.emplace(toggle_optimizer(0));
    step(0, (discriminator->forward(fake) - 1).square().mean());
    return {};
  }
  void step(size_t index, const at::Tensor& loss) {
    ManualOptimizer opt = optimizer(index);
    opt.zero_grad();
    manual_backward(loss);
    opt.step();
  }
  Optimizers configure_optimizers() override {
    Optimizers optimizers(optim::Adam(generator->parameters(), {.lr = 1e-4}));
    optimizers.add(optim::Adam(discriminator->parameters(), {.lr = 1e-4}));
    return optimizers;
  }
};

void train(int64_t width, bool with_guard) {
  seed_everything(1);
  const auto data = std::make_shared<TensorDataset>(Batch{{"x", torch::randn({kSamples, 64})}});
  Trainer({.accelerator = "cpu",
           .max_epochs = kSteps * kBatchSize / kSamples,
           .enable_progress_bar = false,
           .enable_model_summary = false,
           .enable_checkpointing = false,
           .logger = false})
      .fit(make_module<Gan>(width, with_guard), {.train = DataLoader::make(data, {.batch_size = kBatchSize})});
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  at::set_num_threads(1);
  for (const int64_t width : {64, 512}) {
    bench::side_by_side("step", kSteps,
                        {{fmt::format("a GAN of width {}, without the guard", width), [&] { train(width, false); }},
                         {fmt::format("a GAN of width {}, with the guard", width), [&] { train(width, true); }}},
                        rounds);
  }
}
