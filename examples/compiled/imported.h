#pragma once

#include <string>

#include "fulgur.h"
#include "fulgur/programs/program.h"

namespace compiled {

struct ImportedOptions {
  std::string program;
  double lr = 2e-3;
  void describe(fulgur::FieldVisitor& visit) {
    visit({.name = "program", .help = "the network, a file of torch.export.save()"}, &program);
    visit({.name = "lr", .help = "learning rate", .min = 0}, &lr);
  }
};

// A network that was written in Python, with an output "loss", and is trained here by AdamW.
struct Imported : fulgur::Module {
  using Options = ImportedOptions;
  fulgur::nn::Program net{nullptr};
  double lr;
  explicit Imported(const Options& options) : lr(options.lr) {
    if (options.program.empty()) {
      throw fulgur::UsageError("give the network, --model.program=<file>.pt2: see the top of main.cc and text.cc");
    }
    net = register_module("net", fulgur::nn::Program(options.program));
  }
  at::Tensor training_step(const fulgur::Batch& batch, int64_t) override { return net->forward(batch)["loss"]; }
  fulgur::Optimizers configure_optimizers() override { return fulgur::optim::AdamW(parameters(), {.lr = lr}); }
};

// For Python: trained.pt2 in the run's folder.
inline void hand_back(fulgur::Trainer& trainer, Imported& module) {
  if (trainer.is_global_zero()) module.net->export_program(trainer.run_dir() / "trained.pt2");
}

}  // namespace compiled
