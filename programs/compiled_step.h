#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fulgur/programs/program_archive.h"

namespace torch::inductor {
class AOTIModelPackageLoader;
}  // namespace torch::inductor

namespace fulgur::program {

// The training step of a program as native code, which //tools:compile_step has put into the program's archive: forward
// and backward of the output "loss" in one call. The results are those of the program's operators but for rounding, and
// random numbers are others. Threading: run() by one thread at a time; each object loads the code for itself.
class CompiledStep {
 public:
  // `device` is where it runs. `submodule` gives the submodule at a path. The archive and the submodules must outlive
  // the step. Throws CheckpointError if the archive has no such code (see is_in()), or if it cannot be loaded.
  CompiledStep(const std::filesystem::path& file, const ProgramArchive& archive, c10::Device device,
               const std::function<const torch::nn::Module*(std::string_view path)>& submodule);
  ~CompiledStep();

  static bool is_in(const ProgramArchive& archive);

  // Why the code cannot run on `device` of this machine, or is of another version of torch; empty if it can. For an
  // archive that has it.
  static std::string why_not_here(const std::filesystem::path& file, const ProgramArchive& archive, c10::Device device);

  // Why the code was not compiled for this call, such as the mode of a submodule, a size, a precision or a layout;
  // empty if it was. `inputs`: one value per input of the program.
  std::string why_not(const std::vector<c10::IValue>& inputs) const;

  // One tensor per output of the user. The first backward of the loss sets the gradients of the parameters; a second
  // one, and backward of another output, throw. Buffers change as by the program.
  std::vector<at::Tensor> run(const std::vector<c10::IValue>& inputs);

 private:
  struct Weight {
    size_t input;  // the place of the weight among the program's inputs
    std::string name;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    bool is_frozen;  // it needed no gradient at export
  };

  const ExportedProgram& program_;
  const c10::Device device_;
  std::vector<Weight> weights_;

  // The places of the inputs that get gradients, in the order in which the code takes memory for them.
  std::vector<size_t> trained_;

  // Submodules that must be in train mode, or in eval mode, each with its path.
  std::vector<std::pair<const torch::nn::Module*, std::string>> in_train_mode_, in_eval_mode_;

  // The sizes that an input must have, by its place; empty unless the step was compiled with --fixed_sizes.
  std::map<size_t, std::vector<int64_t>> sizes_;

  size_t loss_;  // the place of the loss among the user's outputs
  std::vector<std::string> output_names_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

}  // namespace fulgur::program
