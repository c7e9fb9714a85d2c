// Trains an exported program by SGD for zoo_strategies_test.py and compiled_step_test.py:
//   strategies_program --program=<it>.pt2 --samples=<it>.safetensors --loss=cross_entropy --result=<it>.safetensors ...
// The tensors of the samples are the program's inputs and "target"; each rank takes every world_size-th sample. Rank 0
// writes the parameters and buffers after the last step, by their names in the program; "losses" of all steps, and how
// many of them were "compiled". Takes the Trainer's flags, too.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/seed.h"
#include "fulgur/callbacks/weight_averaging.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/cli/command_line.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/programs/program.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/tiny.h"

namespace {

using namespace fulgur;

struct Options {
  TrainerOptions trainer = fulgur::testing::quiet();
  std::string program, samples, loss, result;
  std::string eval, train, unfreeze;
  bool compiled = true, twice = false;
  double average = 0.0;
  int64_t batch_size = 1;
  int64_t seed = 0;
  double lr = 1e-2;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "program", .help = "file of torch.export.save()"}, &program);
    visit({.name = "samples", .help = "file of the samples"}, &samples);
    visit({.name = "loss",
           .help = "what is minimized; own: the output 'loss'; outputs: that and the output 'output'",
           .choices = {"cross_entropy", "mse", "own", "outputs"}},
          &loss);
    visit({.name = "compiled", .help = "use the compiled step of the program"}, &compiled);
    visit({.name = "twice", .help = "another module of the same file takes each batch before this one"}, &twice);
    visit({.name = "average", .help = "decay of an average of the weights; 0: none"}, &average);
    visit({.name = "result", .help = "file for the trained tensors"}, &result);
    visit({.name = "eval", .help = "submodule of the program that is put in eval mode"}, &eval);
    visit({.name = "train", .help = "submodule of the program that is put in train mode"}, &train);
    visit({.name = "unfreeze", .help = "parameter of the program that is to be trained"}, &unfreeze);
    visit({.name = "lr", .help = "learning rate"}, &lr);
    visit({.name = "seed", .help = "where random numbers begin", .min = 0}, &seed);
    visit({.name = "batch_size", .help = "samples of a rank in a step", .min = 1}, &batch_size);
  }
};

struct Net : Module {
  nn::Program net{nullptr}, other{nullptr};
  std::string kind;
  double lr;
  std::string in_eval, in_train;
  std::vector<at::Tensor> losses;
  int64_t num_compiled = 0;
  explicit Net(const Options& options)
      : kind(options.loss), lr(options.lr), in_eval(options.eval), in_train(options.train) {
    net = register_module("net", nn::Program(options.program, {.compiled = options.compiled}));
    if (options.twice) other = nn::Program(options.program);  // not registered: nothing trains it
    if (!options.unfreeze.empty()) net->named_parameters()[options.unfreeze].set_requires_grad(true);
  }
  void on_train_epoch_start() override {
    if (!in_eval.empty()) net->named_modules()[in_eval]->eval();
    if (!in_train.empty()) net->named_modules()[in_train]->train();
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    if (other) run_backward(other->forward(batch)["loss"]);
    const at::Tensor loss = loss_of(net->forward(batch), batch);
    if (loss.grad_fn()->name() == kReadyGradients) ++num_compiled;
    losses.push_back(loss.detach().clone());
    return loss;
  }
  at::Tensor loss_of(const Batch& outputs, const Batch& batch) const {
    if (kind == "own") return outputs["loss"];
    if (kind == "outputs") return outputs["loss"] + outputs["output"].square().mean();
    const at::Tensor& output = outputs.begin()->second;
    if (kind == "mse") return at::mse_loss(output, batch["target"]);
    return at::cross_entropy_loss(output.flatten(0, -2), batch["target"].flatten());
  }
  Optimizers configure_optimizers() override {
    return optim::SGD(parameters(), {.lr = lr, .momentum = 0.9, .weight_decay = 1e-4});
  }
};

void run(Options options) {
  seed_everything(static_cast<uint64_t>(options.seed));
  const SafetensorsFile file(options.samples);
  std::vector<Batch::Entry> samples;
  for (const SafetensorsEntry& entry : file.entries())
    samples.emplace_back(entry.name, file.tensor(entry.name).clone());
  const auto loader =
      DataLoader::make(TensorDataset::make(Batch(std::move(samples))), {.batch_size = options.batch_size});
  const auto module = make_module<Net>(options);
  if (options.average > 0.0) {
    options.trainer.callbacks.push_back(WeightAveraging::make({.decay = options.average}));
  }
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = loader});
  if (!trainer.is_global_zero()) return;
  NamedTensors tensors;
  for (const auto& item : module->net->named_parameters())
    tensors.emplace_back(item.key(), item.value().detach().clone());
  for (const auto& item : module->net->named_buffers()) tensors.emplace_back(item.key(), item.value().clone());
  tensors.emplace_back("losses", at::stack(module->losses));
  tensors.emplace_back("compiled", at::scalar_tensor(module->num_compiled, at::kLong));
  write_safetensors(options.result, tensors);
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
