#include "fulgur/programs/code.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "fulgur/base/autocast.h"
#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/nn/activation_checkpoint.h"
#include "fulgur/programs/call_arguments.h"
#include "fulgur/programs/size_arithmetic.h"

namespace fulgur::program {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Takes its arguments from the end of the stack and leaves its results there.
using Call = std::function<void(Stack&)>;

struct Instruction {
  std::vector<Source> arguments{};
  Call call{};
  std::vector<std::vector<size_t>> results{};  // per result the slots that it fills: several for a list, none if unused
  std::vector<bool> is_list{};                 // per result
  std::vector<size_t> unused{};                // slots that nothing reads
  std::string place{};                         // for error messages
};

// ---- The modes of dropout and batch norm ----

constexpr std::string_view kMean = "running_mean", kCounter = "num_batches_tracked";

const Argument* find(const Node& node, std::string_view name) {
  const auto found = std::ranges::find(node.arguments, name, &NamedArgument::name);
  return found == node.arguments.end() ? nullptr : &found->argument;
}

bool is_batch_norm(const Node& node) { return node.target.starts_with("torch.ops.aten.batch_norm."); }

// Whether the node is a batch or instance norm of any kind: decomposed ones are aten::_native_batch_norm_legit, of
// which the overload no_stats takes no running mean.
bool is_norm(const Node& node) {
  return node.target.find("batch_norm") != std::string::npos || node.target.find("instance_norm") != std::string::npos;
}

// The counter beside a running mean: "bn.num_batches_tracked" for "bn.running_mean"; empty for another name.
std::string counter_beside(const std::string& mean) {
  return mean.ends_with(kMean) ? mean.substr(0, mean.size() - kMean.size()) + std::string(kCounter) : "";
}

// ---- torch.cond ----

// Passes `output` on. The other tensors get a gradient of zeros besides what they get otherwise. In Python torch.cond
// gives it to every operand, also to one that only the other branch uses, or that is used without gradients; without it
// such an operand would have none, and an optimizer would leave it alone.
class ZeroGradients : public torch::autograd::Function<ZeroGradients> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            at::TensorList others) {
    std::vector<at::Tensor> kept;
    for (const at::Tensor& other : others) kept.push_back(other.detach());
    context->saved_data["others"] = std::move(kept);  // unlike a saved variable, it may be written to until backward
    return output;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list all{gradients.front()};
    for (const at::Tensor& other : context->saved_data["others"].toTensorVector()) all.push_back(at::zeros_like(other));
    return all;
  }
};

std::vector<IValue> run_branch(const Code& code, std::vector<IValue> operands) {
  std::vector<at::Tensor> others;
  for (const IValue& operand : operands) {
    if (operand.isTensor() && operand.toTensor().requires_grad()) others.push_back(operand.toTensor());
  }
  std::vector<IValue> results = code.run(std::move(operands));
  if (others.empty() || !c10::GradMode::is_enabled()) return results;
  for (IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().is_floating_point()) continue;
    result = ZeroGradients::apply(result.toTensor(), at::TensorList(others));
  }
  return results;
}

}  // namespace

struct Code::Parts {
  std::string file;  // for error messages; empty in a graph that another one calls
  size_t num_slots = 0;
  std::vector<size_t> input_slots;  // kNoSlot for an input that is a constant
  std::vector<Instruction> instructions;
  std::vector<Source> outputs;
};

namespace {

class Compiler {
 public:
  Compiler(const Graph& graph, const CodeOptions& options, std::vector<std::string> buffers)
      : graph_(graph), options_(options), buffers_(graph.values.size()) {
    for (size_t i = 0; i < graph.inputs.size() && i < buffers.size(); ++i) {
      if (const ValueRef* value = graph.inputs[i].value()) buffers_[value->index] = std::move(buffers[i]);
    }
  }

  Code::Parts compile() {
    parts_.file = options_.file;
    parts_.num_slots = graph_.values.size();
    for (const Argument& input : graph_.inputs) {
      parts_.input_slots.push_back(input.value() == nullptr ? Source::kNoSlot : input.value()->index);
    }
    find_counters();
    for (size_t i = 0; i < graph_.nodes.size();) i = add_from(i);
    explaining("the results of the graph", [&] {
      for (const Argument& output : graph_.outputs) parts_.outputs.push_back(value_of(output));
    });
    mark_last_uses();
    return std::move(parts_);
  }

 private:
  // Adds the instruction of the node at `i`, or of the region that begins there; returns where to go on.
  size_t add_from(size_t i) {
    if (const std::string call = region_of(graph_.nodes[i]); !call.empty()) {
      size_t end = i + 1;
      while (end < graph_.nodes.size() && region_of(graph_.nodes[end]) == call) ++end;
      add_region(i, end);
      return end;
    }
    add(graph_.nodes[i]);
    return i + 1;
  }

  void add(const Node& node) {
    // This operator checks the precision and the device of the export, which may differ here.
    if (node.target == "torch.ops.aten._assert_tensor_metadata.default") return;
    Instruction instruction{.place = place(node)};
    explaining(instruction.place, [&] {
      if (const SizeFunction* function = find_size_arithmetic(node.target)) {
        compile_size_arithmetic(node, *function, instruction);
      } else if (node.target.starts_with(kHigherOrder)) {
        compile_higher_order(node, instruction);
      } else {
        compile_operator(node, instruction);
      }
    });
    set_results(node.outputs, instruction);
    parts_.instructions.push_back(std::move(instruction));
  }

  static constexpr std::string_view kOperator = "torch.ops.", kHigherOrder = "torch.ops.higher_order.";

  // Errors of `body` get the file and the place in front.
  template <class Body>
  void explaining(std::string_view place, const Body& body) const {
    const std::string prefix = options_.file.empty() ? "" : options_.file + ": ";
    try {
      body();
    } catch (const CheckpointError& error) {
      throw CheckpointError(fmt::format("{}{}: {}", prefix, place, error.what()));
    } catch (const c10::Error& error) {
      throw CheckpointError(fmt::format("{}{}: {}", prefix, place, error.what_without_backtrace()));
    }
  }

  // The options for a graph that this one calls.
  CodeOptions inner_options() const {
    CodeOptions options = options_;
    options.file.clear();
    return options;
  }

  static std::string place(const Node& node) {
    const std::string module = node.modules.empty() ? "" : " in module " + quote(node.modules.back().path);
    return fmt::format("node {} ({}){}", quote(node.name), quote(node.target), module);
  }

  // Operators that reach beyond the tensors of a program. Whoever wants to do harm may find others: docs/programs.md
  // says that programs are for sources which one trusts.
  static void check_is_safe(const std::string& name) {
    if (name == "aten::from_file") throw CheckpointError("a program must not open files");
    if (name.starts_with("inductor::") || name == "aten::_reshape_alias") {
      throw CheckpointError(
          fmt::format("a program must not call {}, which makes views without a check of their bounds", name));
    }
  }

  // "torch.ops.aten.add.Tensor" -> aten::add.Tensor
  static c10::OperatorHandle find_operator(const std::string& target) {
    const size_t space = kOperator.size(), name = target.find('.', space), overload = target.rfind('.');
    if (!target.starts_with(kOperator) || name == target.npos || overload <= name) {
      throw CheckpointError("this function of Python is not supported");
    }
    const std::string suffix = target.substr(overload + 1);
    const c10::OperatorName full(
        target.substr(space, name - space) + "::" + target.substr(name + 1, overload - name - 1),
        suffix == "default" ? "" : suffix);
    check_is_safe(full.name);
    const auto handle = c10::Dispatcher::singleton().findSchema(full);
    if (!handle) {
      throw CheckpointError(
          fmt::format("there is no operator {}; if it is a custom one, link or load the library that registers it",
                      toString(full)));
    }
    return *handle;
  }

  static void compile_size_arithmetic(const Node& node, const SizeFunction& function, Instruction& instruction) {
    if (node.arguments.size() != function.num_arguments) {
      throw CheckpointError(fmt::format("the function has {} arguments, but {} are given", function.num_arguments,
                                        node.arguments.size()));
    }
    for (const NamedArgument& named : node.arguments) {
      const IValue* constant = std::get_if<IValue>(&named.argument.what);
      const bool is_number = constant != nullptr && (constant->isInt() || constant->isDouble() || constant->isBool());
      if (!is_number && named.argument.value() == nullptr) {
        throw CheckpointError(fmt::format("argument '{}' is no number", named.name));
      }
      instruction.arguments.push_back(is_number ? Source(*constant) : Source(named.argument.value()->index, nullptr));
    }
    instruction.call = function.call;
  }

  void compile_operator(const Node& node, Instruction& instruction) {
    const c10::OperatorHandle handle = find_operator(node.target);
    const std::vector<c10::Argument>& schema = handle.schema().arguments();
    std::map<std::string, const Argument*> given;
    for (const NamedArgument& named : node.arguments) {
      if (!given.emplace(named.name, &named.argument).second) {
        throw CheckpointError(fmt::format("argument '{}' is given twice", named.name));
      }
    }
    const bool makes_tensor = makes_from_nothing(schema);
    for (const c10::Argument& argument : schema) {
      const auto found = given.find(argument.name());
      if (found == given.end()) {
        if (!argument.default_value()) {
          throw CheckpointError(fmt::format("argument '{}' is missing", argument.name()));
        }
        instruction.arguments.emplace_back(*argument.default_value());
        continue;
      }
      const at::ScalarType* dtype = std::get_if<at::ScalarType>(&found->second->what);
      const bool follows = makes_tensor && dtype != nullptr && *dtype == options_.exported_dtype;
      try {
        instruction.arguments.push_back(
            follows ? Source(IValue(options_.dtype))
                    : to_source(*found->second, argument.real_type(), argument.N(), options_.device));
      } catch (const CheckpointError& error) {
        throw CheckpointError(fmt::format("argument '{}': {}", argument.name(), error.what()));
      }
      given.erase(found);
    }
    if (!given.empty()) throw CheckpointError(fmt::format("the operator has no argument '{}'", given.begin()->first));
    instruction.call = [handle](Stack& stack) { handle.callBoxed(stack); };
    if (handle.schema().name().starts_with("aten::")) follow_mode(node, schema, instruction);
  }

  static bool makes_from_nothing(const std::vector<c10::Argument>& schema) {
    return std::ranges::none_of(schema, [](const c10::Argument& argument) {
      return argument.type()->str().find("Tensor") != std::string::npos;
    });
  }

  // Lets flags of training follow the mode of the module that the operator belongs to.
  void follow_mode(const Node& node, const std::vector<c10::Argument>& schema, Instruction& instruction) const {
    if (!options_.submodule) return;
    const torch::nn::Module* module = options_.submodule(node.modules.empty() ? "" : node.modules.back().path);
    if (module == nullptr) return;
    for (size_t i = 0; i < schema.size(); ++i) {
      const size_t from_end = schema.size() - i;
      if (schema[i].type()->kind() == c10::TypeKind::BoolType && follows_mode(node, schema[i].name())) {
        instruction.call = [module, from_end, call = std::move(instruction.call)](Stack& stack) {
          stack[stack.size() - from_end] = module->is_training();
          call(stack);
        };
      } else if (schema[i].name() == "dropout_p") {  // attention has no flag, but a probability
        instruction.call = [module, from_end, call = std::move(instruction.call)](Stack& stack) {
          if (!module->is_training()) stack[stack.size() - from_end] = 0.0;
          call(stack);
        };
      }
    }
    count_batches(node, schema, *module, instruction);
  }

  // Finds the nodes by which Python counts the batches of a batch norm, outside of its operator and in training mode
  // only. Such a node gives its counter back, which a second call of the module counts further.
  void find_counters() {
    if (!options_.submodule) return;
    std::set<std::string> of_batch_norms;
    for (const Node& node : graph_.nodes) {
      const Argument* mean = is_batch_norm(node) ? find(node, kMean) : nullptr;
      if (mean != nullptr && mean->value() != nullptr) {
        of_batch_norms.insert(counter_beside(buffers_[mean->value()->index]));
      }
    }
    for (const Node& node : graph_.nodes) {
      const Argument* self = node.target == "torch.ops.aten.add_.Tensor" ? find(node, "self") : nullptr;
      if (self == nullptr || self->value() == nullptr || node.outputs.size() != 1) continue;
      const std::string& name = buffers_[self->value()->index];
      if (!name.ends_with(kCounter) || !of_batch_norms.contains(name) || node.outputs[0].value() == nullptr) continue;
      counted_.insert(name);
      buffers_[node.outputs[0].value()->index] = name;
    }
  }

  // Lets a batch norm count, in training mode, where the graph has a counter beside the running mean: by the graph's
  // own node, or, in a program that was exported in eval mode, here.
  void count_batches(const Node& node, const std::vector<c10::Argument>& schema, const torch::nn::Module& module,
                     Instruction& instruction) const {
    const Argument* self = find(node, "self");
    if (node.target == "torch.ops.aten.add_.Tensor" && self != nullptr && self->value() != nullptr &&
        counted_.contains(buffers_[self->value()->index])) {
      instruction.call = [&module, call = std::move(instruction.call)](Stack& stack) {
        module.is_training() ? call(stack) : stack.resize(1);
      };
      return;
    }
    const Argument* mean = is_batch_norm(node) ? find(node, kMean) : nullptr;
    if (mean == nullptr || mean->value() == nullptr) return;
    const std::string name = counter_beside(buffers_[mean->value()->index]);
    const auto counter = std::ranges::find(buffers_, name);
    if (name.empty() || counter == buffers_.end() || counted_.contains(name)) return;
    // BatchNorm(momentum=None), whose statistics are averages over all batches, has a momentum of 0 in eval mode.
    const Argument* momentum = find(node, "momentum");
    const IValue* number = momentum == nullptr ? nullptr : std::get_if<IValue>(&momentum->what);
    const bool averages_all = number != nullptr && number->isDouble() && number->toDouble() == 0;
    const auto place = std::ranges::find(schema, "momentum", &c10::Argument::name) - schema.begin();
    // The counter travels as one more argument, at the front.
    instruction.arguments.insert(instruction.arguments.begin(),
                                 Source(static_cast<size_t>(counter - buffers_.begin()), nullptr));
    instruction.call = [&module, num_arguments = instruction.arguments.size(), averages_all, place,
                        call = std::move(instruction.call)](Stack& stack) {
      const auto front = stack.end() - static_cast<ptrdiff_t>(num_arguments);
      if (module.is_training()) {
        const at::Tensor& count = front->toTensor().add_(1);
        if (averages_all) *(front + 1 + place) = 1.0 / static_cast<double>(count.item<int64_t>());
      }
      stack.erase(front);
      call(stack);
    };
  }

  // A value, or a constant, as it is.
  Source value_of(const Argument& argument) const { return to_source(argument, nullptr, {}, options_.device); }

  // Whether a result of the graph, or one of its nodes from `begin` on, takes the value.
  static bool is_used(const Graph& graph, size_t value, size_t begin) {
    const auto reads = [value](const Argument& argument) { return mentions(argument, value); };
    return std::ranges::any_of(graph.outputs, reads) ||
           std::any_of(graph.nodes.begin() + static_cast<ptrdiff_t>(begin), graph.nodes.end(), [&](const Node& node) {
             return std::ranges::any_of(node.arguments, reads, &NamedArgument::argument);
           });
  }

  static bool mentions(const Argument& argument, size_t value) {
    if (const ValueRef* found = argument.value()) return found->index == value;
    const auto* items = std::get_if<ArgumentList>(&argument.what);
    return items != nullptr && std::ranges::any_of(*items, [&](const Argument& item) { return mentions(item, value); });
  }

  // ---- Operators that call graphs ----

  void compile_higher_order(const Node& node, Instruction& instruction) {
    const std::string_view name = std::string_view(node.target).substr(kHigherOrder.size());
    if (name == "wrap_with_set_grad_enabled") {
      const auto code = graph_of(node, 1, operands(node, 2));
      load_operands(node, 2, instruction);
      instruction.call = [code, is_enabled = flag(node, 0)](Stack& stack) {
        const c10::AutoGradMode mode(is_enabled);
        call_code(*code, stack);
      };
    } else if (name == "wrap_with_autocast") {
      const auto code = graph_of(node, 4, operands(node, 5));
      load_operands(node, 5, instruction);
      instruction.call = [code, mode = autocast_of(node)](Stack& stack) {
        const ScopedAutocast scope(mode);
        call_code(*code, stack);
      };
    } else if (name == "cond") {
      const auto list = std::get_if<ArgumentList>(&argument(node, 3).what);
      if (list == nullptr) throw CheckpointError("its operands are no list");
      const auto if_true = graph_of(node, 1, *list), if_false = graph_of(node, 2, *list);
      for (const Argument& operand : *list) instruction.arguments.push_back(value_of(operand));
      instruction.arguments.push_back(value_of(argument(node, 0)));
      instruction.call = [if_true, if_false](Stack& stack) {
        const IValue condition = torch::jit::pop(stack);
        const bool is_true = condition.isTensor() ? condition.toTensor().item<bool>() : condition.toBool();
        stack = run_branch(*(is_true ? if_true : if_false), std::exchange(stack, {}));
      };
    } else {
      throw CheckpointError("of the higher-order operators, cond, no_grad and autocast are supported");
    }
  }

  static const Argument& argument(const Node& node, size_t index) {
    if (index >= node.arguments.size()) throw CheckpointError(fmt::format("argument {} is missing", index));
    return node.arguments[index].argument;
  }

  static bool flag(const Node& node, size_t index) {
    const IValue* value = std::get_if<IValue>(&argument(node, index).what);
    if (value == nullptr || !value->isBool()) {
      throw CheckpointError(fmt::format("argument {} is neither true nor false", index));
    }
    return value->toBool();
  }

  static ArgumentList operands(const Node& node, size_t first) {
    ArgumentList list;
    for (size_t i = first; i < node.arguments.size(); ++i) list.push_back(node.arguments[i].argument);
    return list;
  }

  void load_operands(const Node& node, size_t first, Instruction& instruction) const {
    for (const Argument& operand : operands(node, first)) {
      instruction.arguments.push_back(value_of(operand));
    }
  }

  std::shared_ptr<const Code> graph_of(const Node& node, size_t index, const ArgumentList& given) const {
    const auto* graph = std::get_if<std::shared_ptr<const Graph>>(&argument(node, index).what);
    if (graph == nullptr) throw CheckpointError(fmt::format("argument {} is no graph", index));
    if ((*graph)->inputs.size() != given.size()) throw CheckpointError("its graph has another number of inputs");
    return std::make_shared<const Code>(**graph, inner_options(), buffers_of(given));
  }

  std::vector<std::string> buffers_of(const ArgumentList& arguments) const {
    std::vector<std::string> names;
    for (const Argument& argument : arguments) {
      names.push_back(argument.value() == nullptr ? "" : buffers_[argument.value()->index]);
    }
    return names;
  }

  static void call_code(const Code& code, Stack& stack) {
    std::vector<IValue> results = code.run(std::exchange(stack, {}));
    stack = std::move(results);
  }

  // Autocast of the exporting device becomes that of the device where the program runs.
  AutocastState autocast_of(const Node& node) const {
    const c10::DeviceType device = options_.device.type();
    const at::ScalarType* dtype = std::get_if<at::ScalarType>(&argument(node, 1).what);
    if (dtype != nullptr && !at::isFloatingType(*dtype)) {
      throw CheckpointError(fmt::format("autocast to {} is not possible", toString(*dtype)));
    }
    return {.device_type = device,
            .enabled = flag(node, 2),
            .dtype = dtype == nullptr ? at::autocast::get_autocast_dtype(device) : *dtype};
  }

  // ---- Regions whose activations are computed again ----

  // The outermost call of a module that the glob matches; empty if the node is in none.
  std::string region_of(const Node& node) const {
    if (options_.checkpoint.empty()) return "";
    const auto found = std::ranges::find_if(node.modules, [&](const ModuleCall& module) {
      return ::fnmatch(options_.checkpoint.c_str(), module.path.c_str(), 0) == 0;
    });
    return found == node.modules.end() ? "" : found->call;
  }

  void add_region(size_t begin, size_t end) {
    Graph region{.values = graph_.values, .inputs = {}, .outputs = {}, .nodes = {}};
    std::set<size_t> defined, used;
    for (size_t i = begin; i < end; ++i) {
      region.nodes.push_back(graph_.nodes[i]);
      for (const NamedArgument& named : graph_.nodes[i].arguments) {
        for_each_value(named.argument, [&](size_t value) {
          if (!defined.contains(value)) used.insert(value);
        });
      }
      for (const Argument& output : graph_.nodes[i].outputs) {
        for_each_value(output, [&](size_t value) { defined.insert(value); });
      }
    }
    for (const size_t value : counters_beside(used)) used.insert(value);
    for (const size_t value : used) region.inputs.push_back({ValueRef{value}});
    for (const size_t value : defined) {
      if (is_used(graph_, value, end)) region.outputs.push_back({ValueRef{value}});
    }
    CodeOptions options = inner_options();
    options.checkpoint.clear();
    Instruction instruction{.place = place(graph_.nodes[begin])};
    for (const Argument& input : region.inputs) instruction.arguments.push_back(value_of(input));
    explaining(fmt::format("the part from {} on", instruction.place), [&] {
      const std::vector<std::string> buffers = buffers_of(region.inputs);
      std::vector<bool> is_buffer;
      for (const std::string& name : buffers) is_buffer.push_back(!name.empty());
      instruction.call = [code = std::make_shared<const Code>(region, options, buffers), is_buffer](Stack& stack) {
        stack = run_again_in_backward(code, is_buffer, std::exchange(stack, {}));
      };
    });
    set_results(region.outputs, instruction);
    parts_.instructions.push_back(std::move(instruction));
  }

  // The counters of batch norms whose running means are among the values.
  std::vector<size_t> counters_beside(const std::set<size_t>& values) const {
    std::vector<size_t> counters;
    for (const size_t value : values) {
      const std::string name = counter_beside(buffers_[value]);
      const auto found = std::ranges::find(buffers_, name);
      if (!name.empty() && found != buffers_.end()) counters.push_back(static_cast<size_t>(found - buffers_.begin()));
    }
    return counters;
  }

  // The inputs that checkpoint() keeps are the tensors; sizes and buffers are captured. The second time a region runs
  // on copies of its buffers as they were before the first, so that it computes the same and moves no statistics again.
  static std::vector<IValue> run_again_in_backward(const std::shared_ptr<const Code>& code,
                                                   const std::vector<bool>& is_buffer, std::vector<IValue> inputs) {
    if (!c10::GradMode::is_enabled()) return code->run(std::move(inputs));
    std::vector<size_t> kept;
    std::vector<at::Tensor> tensors, buffers_before(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].isTensor()) continue;
      if (is_buffer[i]) {
        buffers_before[i] = inputs[i].toTensor().clone();
        continue;
      }
      kept.push_back(i);
      tensors.push_back(std::exchange(inputs[i], IValue()).toTensor());
    }
    const auto run = [code, kept, buffers_before, others = std::move(inputs),
                      runs = std::make_shared<int>(0)](const std::vector<at::Tensor>& given) {
      std::vector<IValue> all = others;
      for (size_t i = 0; i < kept.size(); ++i) all[kept[i]] = given[i];
      const bool is_replay = (*runs)++ > 0;
      for (size_t i = 0; is_replay && i < all.size(); ++i) {
        if (buffers_before[i].defined()) all[i] = buffers_before[i].clone();
      }
      return code->run(std::move(all));
    };
    return checkpoint(run, std::move(tensors));
  }

  void set_results(const ArgumentList& outputs, Instruction& instruction) const {
    for (const Argument& output : outputs) {
      std::vector<size_t>& slots = instruction.results.emplace_back();
      const bool is_list = std::holds_alternative<ArgumentList>(output.what);
      instruction.is_list.push_back(is_list);
      if (const ValueRef* value = output.value()) slots.push_back(value->index);
      if (!is_list) continue;
      for (const Argument& item : std::get<ArgumentList>(output.what)) {
        slots.push_back(item.value() == nullptr ? Source::kNoSlot : item.value()->index);
      }
    }
  }

  // Going backwards, the first use of a value is its last one.
  void mark_last_uses() {
    std::vector<bool> is_read(parts_.num_slots);
    const auto mark = [&](std::vector<Source>& sources) {
      for (auto source = sources.rbegin(); source != sources.rend(); ++source) {
        source->for_each_value([&](Source& value) {
          if (!is_read[value.slot()]) value.set_last_use();
          is_read[value.slot()] = true;
        });
      }
    };
    mark(parts_.outputs);
    for (auto instruction = parts_.instructions.rbegin(); instruction != parts_.instructions.rend(); ++instruction) {
      for (const std::vector<size_t>& slots : instruction->results) {
        for (const size_t slot : slots) {
          if (slot != Source::kNoSlot && !is_read[slot]) instruction->unused.push_back(slot);
        }
      }
      mark(instruction->arguments);
    }
  }

  const Graph& graph_;
  const CodeOptions& options_;
  std::vector<std::string> buffers_;  // for each value the buffer that it is, or empty
  std::set<std::string> counted_{};   // counters of batch norms that nodes of the graph count
  Code::Parts parts_;
};

void store(const Instruction& instruction, Stack& stack, std::vector<IValue>& slots) {
  TORCH_CHECK(stack.size() == instruction.results.size(), "the operator has ", stack.size(), " results, but the graph ",
              instruction.results.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    const std::vector<size_t>& targets = instruction.results[i];
    if (!instruction.is_list[i]) {
      if (!targets.empty()) slots[targets.front()] = std::move(stack[i]);
      continue;
    }
    const c10::ArrayRef<IValue> items = stack[i].toListRef();
    TORCH_CHECK(items.size() == targets.size(), "the operator has a list of ", items.size(), ", but the graph one of ",
                targets.size());
    for (size_t k = 0; k < items.size(); ++k) {
      if (targets[k] != Source::kNoSlot) slots[targets[k]] = items[k];
    }
  }
  for (const size_t slot : instruction.unused) slots[slot] = IValue();
}

}  // namespace

bool follows_mode(const Node& node, std::string_view argument) {
  if (!node.target.starts_with("torch.ops.aten.")) return false;
  if (argument != "train" && argument != "training" && argument != "use_input_stats") return false;
  if (!is_norm(node)) return true;
  const Argument* mean = find(node, kMean);
  return mean != nullptr && mean->value() != nullptr;
}

Code::Code(const Graph& graph, const CodeOptions& options, std::vector<std::string> buffers)
    : parts_(std::make_unique<const Parts>(Compiler(graph, options, std::move(buffers)).compile())) {}

Code::~Code() = default;
Code::Code(Code&&) noexcept = default;

std::vector<IValue> Code::run(std::vector<IValue> inputs) const {
  std::vector<IValue> slots(parts_->num_slots);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (parts_->input_slots[i] != Source::kNoSlot) slots[parts_->input_slots[i]] = std::move(inputs[i]);
  }
  Stack stack;
  for (const Instruction& instruction : parts_->instructions) {
    try {
      stack.clear();
      for (const Source& argument : instruction.arguments) stack.push_back(argument.load(slots));
      instruction.call(stack);
      store(instruction, stack, slots);
    } catch (c10::Error& error) {
      const std::string& file = parts_->file;
      error.add_context(file.empty() ? instruction.place : fmt::format("{} of {}", instruction.place, file));
      throw;
    }
  }
  std::vector<IValue> outputs;
  for (const Source& output : parts_->outputs) outputs.push_back(output.load(slots));
  return outputs;
}

}  // namespace fulgur::program
