#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/programs/program_archive.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace fulgur {
class LoadedCode;
}  // namespace fulgur

namespace fulgur::program {

// A program as native code, for one way of calling it. //tools:compile_step puts such code into the program's archive:
//   "step"     in train mode, forward and backward of the output "loss" in one call
//   "forward"  in eval mode, all outputs
//   "predict"  in eval mode, all outputs but "loss", without the inputs that only the loss needs
// Results equal those of the program's operators up to rounding; random numbers are drawn differently.
// Threading: run() of "step" by one thread at a time, of the other calls by any number of threads.
class CompiledCall {
 public:
  // `device` is where it runs. `submodule` gives the submodule at a path. The archive and the submodules must outlive
  // the object. `left_out`: the places of the inputs that the call does not take. Throws CheckpointError if the archive
  // has no such code (see is_in()), if it does not fit the program, or if it cannot be loaded.
  CompiledCall(const std::filesystem::path& file, const ProgramArchive& archive, const std::string& name,
               const std::vector<size_t>& left_out, c10::Device device,
               const std::function<const torch::nn::Module*(std::string_view path)>& submodule);
  ~CompiledCall();

  static bool is_in(const std::filesystem::path& file, const ProgramArchive& archive, const std::string& name);

  // Returns the reason why the code cannot run on `device` of this machine, such as another version of torch or
  // compiled code that is not allowed (base/compiled_code.h); empty if it can run. The archive must have the code.
  static std::string why_not_here(const std::filesystem::path& file, const ProgramArchive& archive,
                                  const std::string& name, c10::Device device);

  // Why the code was not compiled for these inputs in the present modes and precision; empty if it was. `inputs`: one
  // value per input of the program.
  std::string why_not(const std::vector<c10::IValue>& inputs) const;

  // True for the first call only, so that a refusal is logged once.
  bool is_first_refusal() { return !has_refused_.exchange(true); }
  const std::string& name() const { return name_; }

  // Returns the user's outputs that this call has, in the order of output_names(). Buffers change as by the program.
  // After "step", the first backward of the loss sets the gradients of the parameters. A second backward throws, and so
  // does a backward of another output. Other calls give no gradients.
  std::vector<at::Tensor> run(const std::vector<c10::IValue>& inputs);

  const std::vector<std::string>& output_names() const { return output_names_; }

 private:
  struct Weight {
    size_t input;  // the place of the weight among the program's inputs
    std::string name;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    bool is_frozen;  // it needed no gradient at export
  };

  using Range = std::pair<int64_t, int64_t>;  // the least and the largest

  bool is_step() const { return name_ == "step"; }
  std::string why_not(const at::Tensor& tensor, const Weight& weight) const;
  std::string why_not(const at::Tensor& tensor, size_t input) const;
  std::string why_not_in_this_precision() const;
  void add_backward(std::vector<at::Tensor>& results, const std::vector<c10::IValue>& inputs);

  const ExportedProgram& program_;
  const std::string name_;
  const c10::Device device_;
  std::vector<Weight> weights_;
  std::vector<size_t> taken_;  // the places of the inputs that the code takes, in its order

  // The places of the inputs whose gradients the code returns after the outputs, in that order.
  std::vector<size_t> trained_;

  // Submodules that must be in train mode, or in eval mode, each with its path.
  std::vector<std::pair<const torch::nn::Module*, std::string>> in_train_mode_, in_eval_mode_;

  std::map<size_t, std::vector<Range>> sizes_;  // what each size of an input may be, by the input's place

  std::optional<at::ScalarType> autocast_;  // the precision of autocast that is compiled in
  std::vector<std::string> output_names_;
  std::unique_ptr<LoadedCode> code_;
  std::atomic<bool> has_refused_ = false;

  // The nodes of autograd that put gradients at the parameters. They end with their last graph, which is that of a
  // step, and to make them for each step would take longer than the rest of its graph.
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
};

}  // namespace fulgur::program
