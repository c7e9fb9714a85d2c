#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/programs/module_tree.h"

namespace fulgur::nn {

// A model of a TorchScript file, of torch.jit.save() in Python or of export_torchscript(), as a module to train. For
// files that exist: TorchScript is deprecated since torch 2.11, and new exports are better read by Program. Parameters
// and buffers have Python's names; the TorchScript interpreter runs it. It starts in train mode, and train() and eval()
// switch all parts of it. A graph that records the device of its export runs on that device alone. Threading:
// forward() by one thread at a time.
class ScriptedProgramImpl : public torch::nn::Module {
 public:
  // Throws CheckpointError if the file is no TorchScript module.
  explicit ScriptedProgramImpl(const std::filesystem::path& file);

  // Calls the model's forward with the tensors of the batch that have its arguments' names; arguments with a default
  // may be missing. Outputs are named as by Program: keys of a dict, "0" and "1" of a tuple, or "output". Throws
  // c10::ValueError for an input that is missing, or an output of another kind.
  Batch forward(const Batch& inputs);

  // The same for a program of one input and one output.
  at::Tensor forward(const at::Tensor& input);

  // As in Program, a data type applies to floating-point tensors only.
  using torch::nn::Module::to;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;

  void train(bool on = true) override;
  void pretty_print(std::ostream& stream) const override;

 private:
  std::filesystem::path file_;
  torch::jit::Module module_;
  program::ModuleTree tree_{*this};
};

TORCH_MODULE(ScriptedProgram);

}  // namespace fulgur::nn
