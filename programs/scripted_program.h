#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <filesystem>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/nn/batch_norm_owner.h"
#include "fulgur/programs/module_tree.h"

namespace fulgur::nn {

// A model of a TorchScript file, of torch.jit.save() in Python or of export_torchscript(), as a module to train. For
// files that exist: TorchScript is deprecated since torch 2.11, and new exports are better read by Program. Parameters
// and buffers have Python's names; the TorchScript interpreter runs it. Threading: forward() by one thread at a time.
//
// Modes. train() and eval() of a submodule switch what torch.jit.script has written of it. At first all submodules are
// in train mode, except those that were in eval mode in a model that was saved in train mode. A file of
// torch.jit.trace, such as export_torchscript() writes, has the modes of its export in its graph: dropout and batch
// norms stay as they were, whatever is_training() says. A graph that records the device of its export runs on that
// device alone.
class ScriptedProgramImpl : public torch::nn::Module, public BatchNormOwner {
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

  std::vector<std::string> batch_norm_paths() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  void take_modes();
  c10::IValue run(std::vector<c10::IValue> inputs, const torch::jit::Kwargs& named = {});

  std::filesystem::path file_;
  torch::jit::Module module_;
  program::ModuleTree tree_{*this};
  std::vector<std::pair<torch::jit::Module, const torch::nn::Module*>>
      modes_;  // each script, and whose mode it follows
};

TORCH_MODULE(ScriptedProgram);

}  // namespace fulgur::nn
