// Trains a network that was written in Python (resnet.py) on the UCI digits, by native code if its step is compiled,
// and writes it back for Python: trained.pt2 in the run's folder.
//   ./bazelw run //examples/compiled:resnet -- resnet.pt2
//   ./bazelw run //tools:compile_step -- resnet.pt2 resnet.step.pt2
//   ./bazelw run //examples/compiled -- --model.program=resnet.step.pt2
#include "examples/digits/digits_data.h"
#include "fulgur.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;

struct ImportedOptions {
  std::string program;
  double lr = 2e-3;
  void describe(FieldVisitor& visit) {
    visit({.name = "program", .help = "file of resnet.py, or of //tools:compile_step"}, &program);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  }
};

struct Imported final : Module {
  using Options = ImportedOptions;
  nn::Program net{nullptr};
  double lr;
  explicit Imported(const Options& options) : lr(options.lr) {
    if (options.program.empty()) {
      throw UsageError("give the network, --model.program=<file>.pt2: see the top of main.cc");
    }
    net = register_module("net", nn::Program(options.program));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override { return net->forward(batch)["loss"]; }
  void validation_step(const Batch& batch, int64_t) override { evaluate("val", batch); }
  void test_step(const Batch& batch, int64_t) override { evaluate("test", batch); }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = lr}); }

  void evaluate(const std::string& stage, const Batch& batch) {
    const Batch outputs = net->forward(batch);
    log(stage + "_loss", outputs["loss"], {.prog_bar = true});
    log(stage + "_acc", outputs["logits"].argmax(1).eq(batch["label"]).to(at::kFloat).mean(), {.prog_bar = true});
  }
};

}  // namespace

int main(int argc, char** argv) {
  return cli::run<Imported, digits::DigitsData>(
      argc, argv,
      {.trainer = {.max_epochs = 5, .checkpoint = {.monitor = "val_loss"}},
       .after_fit = [](Trainer& trainer, const auto& module, auto& data) {
         trainer.test(module, data, trainer.options().enable_checkpointing.value() ? "best" : "");
         if (trainer.is_global_zero()) module->net->export_program(trainer.run_dir() / "trained.pt2");
       }});
}
