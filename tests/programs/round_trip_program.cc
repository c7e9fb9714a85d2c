// round_trip_program <program.pt2> <folder> [epochs]: trains an exported program, for 3 epochs by default, with a
// checkpoint in <folder>/runs/trip, and writes <folder>/expected.safetensors: a batch "x" and what the trained program
// makes of it in eval mode, "y".
#include <c10/core/GradMode.h>

#include <cstdlib>
#include <string>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/core/make_module.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/optim/adam.h"
#include "fulgur/programs/program.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/tiny.h"

namespace {

using namespace fulgur;

struct Net : Module {
  nn::Program net{nullptr};
  explicit Net(const std::string& file) { net = register_module("net", nn::Program(file)); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::mse_loss(net->forward(batch)["y"], batch["y"]);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  const std::string folder = argv[2];
  const auto module = make_module<Net>(std::string(argv[1]));
  TrainerOptions options = fulgur::testing::quiet({.max_epochs = argc == 4 ? std::atoi(argv[3]) : 3});
  options.enable_checkpointing = true;
  options.default_root_dir = folder;
  options.name = "trip";
  Trainer(options).fit(module, {.train = fulgur::testing::tiny_loader(48, 8)});
  module->eval();
  const c10::NoGradGuard no_gradient;
  const at::Tensor x = torch::randn({5, 4});
  write_safetensors(folder + "/expected.safetensors", {{"x", x}, {"y", module->net->forward({{"x", x}})["y"]}});
}
