#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/nn/batch_norm_owner.h"
#include "fulgur/programs/module_tree.h"

namespace fulgur {
class ProgramArchive;
namespace program {
class Code;
class CompiledCall;
}  // namespace program
}  // namespace fulgur

namespace fulgur::nn {

struct ProgramOptions {
  // A glob of module paths, such as "layers.*": the activations of each call of such a module are not kept, but
  // computed again in backward (see checkpoint()), on copies of the buffers. The program must live until backward is
  // done. Empty: all are kept.
  std::string checkpoint{};

  // Whether code that //tools:compile_step has put into the archive is run where it applies. This is native code: run
  // it only if you trust its source (see allow_compiled_code()). A compiled step keeps the activations that it was
  // compiled to keep (--checkpoint of the tool), so that with `checkpoint` it is not used.
  bool compiled = true;
};

// A model that Python has exported by torch.export.export() and torch.export.save() (torch 2.11), as a module that can
// be trained here: no Python in the process, the same operators in the same order, and so the same numbers. An archive
// with compiled code (docs/compiled.md) runs that instead, in which only the output "loss" has gradients.
//   struct Finetune : Module {
//     nn::Program net{nullptr};
//     explicit Finetune(const std::string& file) { net = register_module("net", nn::Program(file)); }
//     at::Tensor training_step(const Batch& batch, int64_t) override {
//       return F::cross_entropy(net->forward(batch)["logits"], batch["targets"]);
//     }
//   };
// Parameters and persistent buffers have Python's names, in a tree of submodules: "layers.0.attn.weight". Tied weights
// are tied, and a parameter needs a gradient if it did in Python.
//
// Modes. train() and eval() of a submodule switch its dropout, batch norm and recurrent dropout, whatever the mode at
// export. At first all submodules are in train mode, except those that were in eval mode in a model that was exported
// in train mode. What Python has written into the graph by itself cannot be switched, nor what it has left out, such as
// dropout within nn.MultiheadAttention in an export in eval mode: a line of the log names it when the program is
// loaded. A program of //tools:export that was TorchScript follows the mode of the root. Device and precision are those
// of the parameters: to(device), to(dtype) and every strategy work as for other modules.
//
// Threading: forward() by one thread at a time; several programs may read the same file.
// Source: https://docs.pytorch.org/docs/2.11/export.html
class ProgramImpl : public torch::nn::Module, public BatchNormOwner {
 public:
  // Throws CheckpointError if the file is no such archive, or has an operator that this process does not know, and
  // UsageError if no module that the program calls matches options.checkpoint.
  explicit ProgramImpl(const std::filesystem::path& file, ProgramOptions options = {});
  ~ProgramImpl() override;

  // Runs the program on its inputs, by the names of forward's arguments in Python; those of a container are "batch.ids"
  // and the like. Other tensors of the batch are ignored. Outputs are named by their keys in Python ("logits"), by
  // their places in a tuple ("0", "1.0"), or "output" if there is one tensor alone; a number becomes a tensor without
  // dimensions. A program with an output "loss" among others computes the others from a batch without the inputs that
  // only the loss needs ("target"). Throws c10::ValueError for an input that is missing, has another data type
  // (floating-point types count as one) or number of dimensions than at export, a size for which the program was not
  // exported or that one of Python's guards refuses, or another value for a number that was fixed at export.
  Batch forward(const Batch& inputs);

  // Runs a program of one input and one output, both tensors. Throws as the other forward() does, and c10::ValueError
  // if the program has more inputs or outputs.
  at::Tensor forward(const at::Tensor& input);

  // The names of the inputs that forward() needs, and of its outputs.
  std::vector<std::string> input_names() const;
  std::vector<std::string> output_names() const;

  // Unlike in torch::nn::Module, and like in Python, a data type applies to floating-point tensors only: counters and
  // positions stay whole numbers.
  void to(torch::Device device, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;

  // Writes the archive with the current parameters and buffers in it, for torch.export.load() in Python.
  void export_program(const std::filesystem::path& file) const;

  std::vector<std::string> batch_norm_paths() const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  void register_tensors();
  void set_modes();
  void name_unread_guards() const;
  void find_inputs_of_loss();
  void load_compiled();
  std::unique_ptr<program::CompiledCall> compiled_call(const std::string& name,
                                                       const std::vector<size_t>& left_out = {});
  void compile();
  void compile_if_moved();
  at::Tensor first_parameter() const;
  bool lacks_inputs_of_loss(const Batch& batch) const;
  std::vector<c10::IValue> inputs_of(const Batch& batch, bool without_loss) const;
  program::CompiledCall* compiled_for(const std::vector<c10::IValue>& inputs, bool without_loss);

  std::filesystem::path file_;
  ProgramOptions options_;
  std::shared_ptr<const ProgramArchive> archive_;
  program::ModuleTree tree_{*this};
  std::vector<at::Tensor> tensors_;    // for each input of the graph its parameter or buffer; undefined for others
  std::vector<at::Tensor> constants_;  // the same for what is not part of the state dict, on the device of the code
  std::unique_ptr<const program::Code> code_;
  std::vector<size_t> inputs_of_loss_;  // the places of the inputs that only the output "loss" needs
  std::vector<size_t> outputs_without_loss_;
  std::unique_ptr<const program::Code> code_without_loss_;  // null: there are no such inputs
  std::unique_ptr<program::CompiledCall> compiled_step_, compiled_forward_, compiled_predict_;  // null: not to be used
  std::vector<std::pair<std::string, std::string>> unused_calls_;  // compiled calls that do not run, with the reasons
  std::atomic<bool> has_to_name_unused_calls_ = false;             // in the log, at the next run
  c10::Device device_ = c10::kCPU;                                 // where the code runs
  at::ScalarType dtype_ = at::kFloat;                              // the data type of the parameters that it runs with
  at::ScalarType exported_dtype_ = at::kFloat;
};

// A handle to a ProgramImpl, as torch's module holders are: copies share one module.
class Program : public torch::nn::ModuleHolder<ProgramImpl> {
 public:
  using torch::nn::ModuleHolder<ProgramImpl>::ModuleHolder;
  explicit Program(const std::filesystem::path& file, ProgramOptions options = {});
};

}  // namespace fulgur::nn
