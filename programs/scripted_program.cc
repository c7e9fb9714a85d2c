#include "fulgur/programs/scripted_program.h"

#include <ATen/core/function_schema.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/jit/serialization/import.h>

#include <set>
#include <unordered_map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur::nn {
namespace {

torch::jit::Module load_script(const std::filesystem::path& file) {
  try {
    return torch::jit::load(file.string());
  } catch (const c10::Error& error) {
    throw CheckpointError(fmt::format("{}: no TorchScript module: {}", file.string(), error.what_without_backtrace()));
  }
}

// Adds the tensors of a result, by the keys and places of the containers that they are in.
void add(const c10::IValue& value, const std::string& name, std::vector<Batch::Entry>& outputs) {
  const auto inner = [&](const std::string& own) { return name.empty() ? own : name + '.' + own; };
  if (value.isTensor()) {
    outputs.emplace_back(name.empty() ? "output" : name, value.toTensor());
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) add(item.value(), inner(item.key().toStringRef()), outputs);
  } else if (value.isTuple() || value.isList()) {
    const c10::ArrayRef<c10::IValue> items = value.isTuple() ? value.toTupleRef().elements() : value.toListRef();
    for (size_t i = 0; i < items.size(); ++i) add(items[i], inner(std::to_string(i)), outputs);
  } else {
    TORCH_CHECK_VALUE(value.isNone(), "an output is a ", value.tagKind(),
                      ", but tensors and containers of them are read");
  }
}

}  // namespace

ScriptedProgramImpl::ScriptedProgramImpl(const std::filesystem::path& file) : file_(file), module_(load_script(file)) {
  for (const auto& [name, tensor] : module_.named_parameters()) {
    tree_.add_parameter(name, tensor, tensor.requires_grad());
  }
  for (const auto& [name, tensor] : module_.named_buffers()) tree_.add_buffer(name, tensor);
  take_modes();
}

// A submodule that has two names follows the first. A part that was frozen has no mode.
void ScriptedProgramImpl::take_modes() {
  const bool was_training = module_.is_training();
  std::set<const void*> known;
  for (const auto& [name, script] : module_.named_modules()) {
    if (!script.hasattr("training") || !known.insert(script._ivalue().get()).second) continue;
    torch::nn::Module& module = tree_.at(name);
    module.train(!was_training || script.is_training());  // parents come first: it sets the children, too
    modes_.emplace_back(script, &module);
  }
}

c10::IValue ScriptedProgramImpl::run(std::vector<c10::IValue> inputs, const torch::jit::Kwargs& named) {
  for (auto& [script, module] : modes_) {
    if (script.is_training() != module->is_training()) script.setattr("training", module->is_training());
  }
  return module_.forward(std::move(inputs), named);
}

Batch ScriptedProgramImpl::forward(const Batch& inputs) {
  const c10::FunctionSchema& schema = module_.get_method("forward").function().getSchema();
  std::unordered_map<std::string, c10::IValue> arguments;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == "self") continue;
    if (inputs.contains(argument.name())) {
      arguments[argument.name()] = inputs[argument.name()];
      continue;
    }
    if (argument.default_value()) continue;
    std::vector<std::string> given;
    for (const auto& [name, tensor] : inputs) given.push_back(name);
    TORCH_CHECK_VALUE(false, fmt::format("{} needs the input {}: {}", file_.string(), argument.name(),
                                         unknown_name_message("tensor of the batch", argument.name(), given)));
  }
  std::vector<Batch::Entry> outputs;
  add(run({}, arguments), "", outputs);
  return Batch(std::move(outputs));
}

at::Tensor ScriptedProgramImpl::forward(const at::Tensor& input) {
  std::vector<Batch::Entry> outputs;
  add(run({input}), "", outputs);
  TORCH_CHECK_VALUE(outputs.size() == 1,
                    fmt::format("{} has {} outputs: call forward() with a Batch", file_.string(), outputs.size()));
  return outputs.front().second;
}

void ScriptedProgramImpl::to(torch::Dtype dtype, bool non_blocking) {
  program::set_floating_dtype(*this, dtype, non_blocking);
}

void ScriptedProgramImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  to(device, non_blocking);
  to(dtype, non_blocking);
}

std::vector<std::string> ScriptedProgramImpl::batch_norm_paths() const {
  std::vector<std::string> paths;
  for (const auto& [name, script] : module_.named_modules()) {
    const std::string type = script.type()->name() ? script.type()->name()->name() : "";
    if (script.hasattr("num_batches_tracked") && type.find("BatchNorm") != std::string::npos) paths.push_back(name);
  }
  return paths;
}

void ScriptedProgramImpl::pretty_print(std::ostream& stream) const {
  stream << "fulgur::nn::ScriptedProgram(" << file_.string() << ")";
}

}  // namespace fulgur::nn
