#include "fulgur/programs/exported_program.h"

#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/programs/code.h"
#include "fulgur/programs/module_tree.h"
#include "tests/checkpoint/fuzz/require.h"

namespace {

using namespace fulgur;
using namespace fulgur::program;
using fulgur::testing::require;

void mark(const Argument& argument, std::vector<bool>& defined) {
  if (const ValueRef* value = argument.value()) {
    require(!defined.at(value->index));
    defined[value->index] = true;
  }
  if (const auto* items = std::get_if<ArgumentList>(&argument.what)) {
    for (const Argument& item : *items) mark(item, defined);
  }
}

void check(const Graph& graph);

void check_use(const Argument& argument, const std::vector<bool>& defined) {
  if (const ValueRef* value = argument.value()) require(defined.at(value->index));
  if (const auto* items = std::get_if<ArgumentList>(&argument.what)) {
    for (const Argument& item : *items) check_use(item, defined);
  }
  if (const auto* graph = std::get_if<std::shared_ptr<const Graph>>(&argument.what)) check(**graph);
}

// Each value is defined once, before it is used.
void check(const Graph& graph) {
  std::vector<bool> defined(graph.values.size());
  for (const Argument& input : graph.inputs) mark(input, defined);
  for (const Node& node : graph.nodes) {
    for (const NamedArgument& named : node.arguments) check_use(named.argument, defined);
    for (const Argument& output : node.outputs) mark(output, defined);
  }
  for (const Argument& output : graph.outputs) check_use(output, defined);
}

}  // namespace

// The JSON of a program is refused with one type of error, or its graph is sound and is compiled or refused. Nothing
// is run.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const ExportedProgram program = parse_program({reinterpret_cast<const char*>(data), size}, "file");
    require(program.inputs.size() == program.graph.inputs.size());
    require(program.outputs.size() == program.graph.outputs.size());
    check(program.graph);
    std::vector<std::string> buffers;
    for (const Input& input : program.inputs) {
      buffers.push_back(input.kind == Input::Kind::buffer ? input.name : "");
    }
    for (const std::string checkpoint : {"", "*"}) {
      torch::nn::Module root;
      ModuleTree tree(root);
      const Code code(program.graph,
                      {.file = "file",
                       .submodule = [&](std::string_view path) { return &tree.at(path); },
                       .checkpoint = checkpoint},
                      buffers);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
