#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/programs/exported_program.h"

namespace fulgur {

class LoadedCode;

// A program that AOTInductor (torch 2.11) has compiled to native code; loading a package runs that code. A package of
// //tools:export also has what is needed to check inputs and to change weights. A package that Python alone has made
// does not record data types and sizes, so that its code relies on them unchecked.
// Threading: run() may be called from several threads, unless the program changes a buffer of its own.
class CompiledPackage {
 public:
  // `device` says which GPU; the package says whether it is for the CPU or for GPUs. Throws CheckpointError if the file
  // is no such package, or was compiled for a device or for instructions that this machine does not have.
  CompiledPackage(const std::filesystem::path& file, c10::Device device);
  ~CompiledPackage();

  // Names are those of nn::Program; a package that Python alone has made calls positional inputs "0", "1".
  Batch run(const Batch& inputs);

  // Runs that have begun finish with the weights that they began with. Throws UsageError for a package that Python
  // alone has made: it may have weights within its code.
  void set_weights(const std::filesystem::path& checkpoint);

 private:
  std::vector<at::Tensor> arguments(const Batch& batch) const;
  [[noreturn]] void fail(std::string_view reason) const;

  const std::filesystem::path file_;
  c10::Device device_;
  std::optional<program::ExportedProgram> program_;  // what was compiled; null if Python alone has made it
  program::CallNames names_;
  std::unique_ptr<LoadedCode> code_;
  std::mutex setting_;  // held by set_weights()
  bool has_set_weights_ = false;
};

}  // namespace fulgur
