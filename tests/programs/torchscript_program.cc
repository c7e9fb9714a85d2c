// TorchScript in and out, for torchscript_test.py:
// - torchscript_program train <file.pt> <batch.safetensors> prints the losses of 5 steps of SGD on the batch, the
//   parameters' names, and the types of the buffers after to(bf16);
// - torchscript_program modes <file.pt> prints the paths of its batch norms, and after each of some steps in train and
//   eval mode how many batches the buffers "norm.num_batches_tracked" and "frozen.num_batches_tracked" count;
// - torchscript_program export <file.pt> writes a module of C++ and, beside it, a batch and the answer to it;
// - torchscript_program refuse prints why modules are refused that cannot be traced.
#include <ATen/ops/mse_loss.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/scoped_modes.h"
#include "fulgur/programs/export_torchscript.h"
#include "fulgur/programs/scripted_program.h"

namespace {

using namespace fulgur;

void train(const std::string& program, const std::string& batch) {
  nn::ScriptedProgram net(program);
  const SafetensorsFile file(batch);
  for (int step = 0; step < 5; ++step) {
    net->zero_grad();
    const Batch outputs = net->forward({{"x", file.tensor("x").clone()}});
    const at::Tensor loss = at::mse_loss(outputs["first"], file.tensor("y").clone());
    loss.backward();
    fmt::print("{:.9g}\n", loss.item<double>());
    const c10::NoGradGuard no_gradient;
    for (const auto& parameter : net->named_parameters()) {
      if (parameter.value().grad().defined()) parameter.value().sub_(parameter.value().grad(), 0.1);
    }
  }
  for (const auto& parameter : net->named_parameters()) fmt::print("{}\n", parameter.key());
  net->to(torch::kBFloat16);
  for (const auto& buffer : net->named_buffers()) {
    fmt::print("{} is {}\n", buffer.key(), c10::toString(buffer.value().scalar_type()));
  }
}

void show_modes(const std::string& program) {
  nn::ScriptedProgram net(program);
  fmt::print("{}\n", fmt::join(net->batch_norm_paths(), " "));
  const auto step = [&] {
    net->forward({{"x", torch::randn({6, 4})}});
    const auto buffers = net->named_buffers();
    fmt::print("{} {}\n", buffers["norm.num_batches_tracked"].item<int64_t>(),
               buffers["frozen.num_batches_tracked"].item<int64_t>());
  };
  step();
  {
    const ScopedModes modes(*net);
    net->eval();
    step();
  }
  step();
  net->named_children()["norm"]->eval();
  step();
  net->train();
  step();
}

struct Net : Module {
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  Net() {
    hidden = register_module("hidden", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
    out = register_module("out", torch::nn::Linear(8, 3));
  }
  Batch predict_step(const Batch& batch, int64_t) override {
    const at::Tensor features = dropout->forward(norm->forward(hidden->forward(batch["x"])).relu());
    return {{"logits", out->forward(features) * batch["scale"]}, {"features", features}};
  }
};

struct KeepsTheBatchSize : Net {
  Batch predict_step(const Batch& batch, int64_t) override {
    const at::Tensor x = batch["x"];
    return {{"logits", hidden->forward(x).reshape({x.size(0), 2, 4}).sum(1)}};
  }
};

struct Branches : Net {
  Batch predict_step(const Batch& batch, int64_t) override {
    const at::Tensor x = hidden->forward(batch["x"]);
    return {{"logits", batch["x"].size(0) > 4 ? x : -x}};
  }
};

Batch example() { return {{"x", torch::randn({6, 4})}, {"scale", torch::randn({6, 1})}}; }

void write(const std::string& file) {
  torch::manual_seed(1);
  const auto net = make_module<Net>();
  net->norm->running_mean.normal_();
  net->norm->eval();  // export_torchscript must restore this mode
  const Batch batch = example();
  export_torchscript(*net, batch, file);
  if (!net->is_training() || net->norm->is_training()) std::exit(3);
  net->eval();
  const c10::NoGradGuard no_gradient;
  NamedTensors tensors(batch.begin(), batch.end());
  for (const auto& [name, tensor] : net->predict_step(batch, 0)) tensors.emplace_back(name, tensor);
  write_safetensors(file + ".safetensors", tensors);
}

template <class M>
void refuse(const std::filesystem::path& file) {
  try {
    export_torchscript(*make_module<M>(), example(), file);
    fmt::print("was written\n");
  } catch (const SetupError& error) {
    fmt::print("{}{}\n", error.what(), std::filesystem::exists(file) ? ", but is there" : "");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "train" && argc == 4) {
    train(argv[2], argv[3]);
  } else if (command == "modes" && argc == 3) {
    show_modes(argv[2]);
  } else if (command == "export" && argc == 3) {
    write(argv[2]);
  } else if (command == "refuse") {
    refuse<KeepsTheBatchSize>("sizes.pt");
    refuse<Branches>("branches.pt");
  } else {
    return 2;
  }
}
