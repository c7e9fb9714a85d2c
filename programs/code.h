#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/programs/graph.h"

namespace fulgur::program {

// What a graph is compiled for.
struct CodeOptions {
  std::string file;  // for error messages

  // Where the program runs, and in which precision. A device that is written in the graph becomes this one; tensors
  // that the graph makes from nothing (zeros, arange), with the data type of the exported parameters, get `dtype`.
  c10::Device device = c10::kCPU;
  at::ScalarType exported_dtype = at::kFloat, dtype = at::kFloat;

  // The submodule at a path ("layers.0.dropout"), whose train or eval mode decides what dropout and batch norm of that
  // module do. It must outlive the code; null: the graph's own flag holds.
  std::function<const torch::nn::Module*(std::string_view path)> submodule{};

  // A glob of module paths: the activations of each call of such a module are computed again in backward. Empty: none.
  std::string checkpoint{};
};

// Whether a flag of the node says that the model is training, and so follows the train or eval mode of the module that
// the node belongs to: "train" of dropout, "training" of batch norm. A batch or instance norm without running
// statistics, also a decomposed one, has such a flag, too, but takes the statistics of the batch in either mode.
bool follows_mode(const Node& node, std::string_view argument);

// A graph that can be run: every operator is looked up, every argument converted to what its schema asks for, and every
// value is freed after its last use. Runs through the dispatcher, so that autograd, autocast and each device work as
// for operators that C++ code calls. Threading: run() may be called from several threads.
class Code {
 public:
  struct Parts;  // defined in code.cc, which compiles them

  // `buffers`: for each input of the graph the name of the buffer that it is; empty for other inputs. Throws
  // CheckpointError, with the node and its module, for an operator that is not known or is not called as its schema
  // says.
  Code(const Graph& graph, const CodeOptions& options, std::vector<std::string> buffers);
  ~Code();
  Code(Code&&) noexcept;

  // Takes one value per input of the graph (values for constants are ignored) and returns one per output. If an
  // operator throws, the exception also names the node, its module and the file.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs) const;

 private:
  std::unique_ptr<const Parts> parts_;
};

}  // namespace fulgur::program
