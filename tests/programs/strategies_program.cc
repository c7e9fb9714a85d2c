// Trains an exported program by SGD for zoo_strategies_test.py:
//   strategies_program --program=<it>.pt2 --samples=<it>.safetensors --loss=cross_entropy --result=<it>.safetensors ...
// The tensors of the samples are the program's inputs and "target"; each rank takes every world_size-th sample. Rank 0
// writes the parameters and buffers after the last step, by their names in the program. Takes the Trainer's flags, too.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/mse_loss.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/core/make_module.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/programs/program.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/tiny.h"

namespace {

using namespace fulgur;

struct Options {
  TrainerOptions trainer = testing::quiet();
  std::string program, samples, loss, result;
  int64_t batch_size = 1;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "program", .help = "file of torch.export.save()"}, &program);
    visit({.name = "samples", .help = "file of the samples"}, &samples);
    visit({.name = "loss", .help = "what is minimized", .choices = {"cross_entropy", "mse"}}, &loss);
    visit({.name = "result", .help = "file for the trained tensors"}, &result);
    visit({.name = "batch_size", .help = "samples of a rank in a step", .min = 1}, &batch_size);
  }
};

struct Net : Module {
  nn::Program net{nullptr};
  std::string loss;
  explicit Net(const Options& options) : loss(options.loss) {
    net = register_module("net", nn::Program(options.program));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor output = net->forward(batch).begin()->second;
    if (loss == "mse") return at::mse_loss(output, batch["target"]);
    return at::cross_entropy_loss(output.flatten(0, -2), batch["target"].flatten());
  }
  Optimizers configure_optimizers() override {
    return optim::SGD(parameters(), {.lr = 1e-2, .momentum = 0.9, .weight_decay = 1e-4});
  }
};

void run(const Options& options) {
  const SafetensorsFile file(options.samples);
  std::vector<Batch::Entry> samples;
  for (const SafetensorsEntry& entry : file.entries())
    samples.emplace_back(entry.name, file.tensor(entry.name).clone());
  const auto loader =
      DataLoader::make(TensorDataset::make(Batch(std::move(samples))), {.batch_size = options.batch_size});
  const auto module = make_module<Net>(options);
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = loader});
  if (!trainer.is_global_zero()) return;
  NamedTensors tensors;
  for (const auto& item : module->net->named_parameters())
    tensors.emplace_back(item.key(), item.value().detach().clone());
  for (const auto& item : module->net->named_buffers()) tensors.emplace_back(item.key(), item.value().clone());
  write_safetensors(options.result, tensors);
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
