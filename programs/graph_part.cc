#include "fulgur/programs/graph_part.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace fulgur::program {
namespace {

// The schema of "torch.ops.aten.add.Tensor"; null for a function of Python, and for what this process does not have.
const c10::FunctionSchema* schema_of(const std::string& target) {
  constexpr std::string_view kOperator = "torch.ops.";
  const size_t name = target.find('.', kOperator.size()), overload = target.rfind('.');
  if (!target.starts_with(kOperator) || name == target.npos || overload <= name) return nullptr;
  const std::string suffix = target.substr(overload + 1);
  const auto handle = c10::Dispatcher::singleton().findSchema(
      {target.substr(kOperator.size(), name - kOperator.size()) + "::" + target.substr(name + 1, overload - name - 1),
       suffix == "default" ? "" : suffix});
  return handle ? &handle->schema() : nullptr;
}

// Operators that may give an argument, or views of it, back without saying so in their schema.
bool may_return_argument(const std::string& target) {
  constexpr std::string_view kNames[] = {
      "alpha_dropout",         "atleast_1d",        "atleast_2d", "atleast_3d",      "dropout",
      "feature_alpha_dropout", "broadcast_tensors", "meshgrid",   "feature_dropout", "type_as"};
  return std::ranges::any_of(
      kNames, [&](std::string_view name) { return target.starts_with("torch.ops.aten." + std::string(name) + '.'); });
}

// The graphs that an operator of a higher order calls.
std::vector<const Graph*> graphs_of(const Node& node) {
  std::vector<const Graph*> graphs;
  for (const NamedArgument& named : node.arguments) {
    const auto* graph = std::get_if<std::shared_ptr<const Graph>>(&named.argument.what);
    if (graph != nullptr) graphs.push_back(graph->get());
  }
  return graphs;
}

// What such an operator calls its graphs with.
ArgumentList operands_of(const Node& node) {
  ArgumentList operands;
  for (const NamedArgument& named : node.arguments) {
    if (std::holds_alternative<std::shared_ptr<const Graph>>(named.argument.what)) {
      operands.clear();
    } else if (const auto* items = std::get_if<ArgumentList>(&named.argument.what)) {
      operands.insert(operands.end(), items->begin(), items->end());
    } else {
      operands.push_back(named.argument);
    }
  }
  return operands;
}

std::vector<size_t> values_of(const Argument& argument) {
  std::vector<size_t> values;
  for_each_value(argument, [&](size_t value) { values.push_back(value); });
  return values;
}

std::vector<size_t> values_of(const Node& node) {
  std::vector<size_t> values;
  for (const NamedArgument& named : node.arguments) {
    for_each_value(named.argument, [&](size_t value) { values.push_back(value); });
  }
  return values;
}

// Which values of a graph may share memory: a view and its base, an argument and the result that is that argument.
class Aliases {
 public:
  explicit Aliases(const Graph& graph) : parents_(graph.values.size()) {
    std::iota(parents_.begin(), parents_.end(), size_t{0});
  }

  size_t set_of(size_t value) const {
    while (parents_[value] != value) value = parents_[value];
    return value;
  }

  // Notes that results of the node may be arguments of it, or views of them.
  void add(const Node& node) {
    std::vector<size_t> shared;
    const c10::FunctionSchema* schema = schema_of(node.target);
    const bool shares_all = !graphs_of(node).empty() || may_return_argument(node.target);
    if (schema == nullptr && !shares_all) return;
    for (const NamedArgument& named : node.arguments) {
      const std::optional<int> place = shares_all ? std::nullopt : schema->argumentIndexWithName(named.name);
      if (!shares_all && (!place || schema->arguments()[static_cast<size_t>(*place)].alias_info() == nullptr)) continue;
      for_each_value(named.argument, [&](size_t value) { shared.push_back(value); });
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const bool is_new =
          !shares_all && (i >= schema->returns().size() || schema->returns()[i].alias_info() == nullptr);
      if (!is_new) for_each_value(node.outputs[i], [&](size_t value) { shared.push_back(value); });
    }
    for (const size_t value : shared) join(shared.front(), value);
  }

 private:
  void join(size_t one, size_t other) {
    if (set_of(one) == set_of(other)) return;
    parents_[set_of(other)] = set_of(one);
  }

  std::vector<size_t> parents_;  // by value; a set's own value has itself
};

std::vector<size_t> written_by(const Node& node);

// Whether each input of a graph is written to.
std::vector<bool> written_inputs(const Graph& graph) {
  Aliases aliases(graph);
  std::vector<size_t> written;
  for (const Node& node : graph.nodes) {
    aliases.add(node);
    for (const size_t value : written_by(node)) written.push_back(value);
  }
  std::vector<bool> result;
  for (const Argument& input : graph.inputs) {
    result.push_back(input.value() != nullptr && std::ranges::any_of(written, [&](size_t value) {
                       return aliases.set_of(value) == aliases.set_of(input.value()->index);
                     }));
  }
  return result;
}

// The values that a node writes to.
std::vector<size_t> written_by(const Node& node) {
  std::vector<size_t> written;
  const ArgumentList operands = operands_of(node);
  for (const Graph* graph : graphs_of(node)) {
    const std::vector<bool> is_written = written_inputs(*graph);
    for (size_t i = 0; i < std::min(is_written.size(), operands.size()); ++i) {
      if (is_written[i]) for_each_value(operands[i], [&](size_t value) { written.push_back(value); });
    }
  }
  const c10::FunctionSchema* schema = schema_of(node.target);
  if (schema == nullptr) return written;
  for (const NamedArgument& named : node.arguments) {
    const std::optional<int> place = schema->argumentIndexWithName(named.name);
    if (!place) continue;
    const c10::AliasInfo* alias = schema->arguments()[static_cast<size_t>(*place)].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_each_value(named.argument, [&](size_t value) { written.push_back(value); });
  }
  return written;
}

// An input and a dimension with the same symbol as a size of another input.
std::optional<std::pair<size_t, int64_t>> same_size(const ExportedProgram& program, const Size& size,
                                                    const std::vector<size_t>& left_out) {
  const auto* symbolic = std::get_if<SymbolicSize>(&size);
  if (symbolic == nullptr || symbolic->factor != 1 || symbolic->offset != 0) return {};
  for (size_t i = 0; i < program.inputs.size(); ++i) {
    const Input& input = program.inputs[i];
    if (input.kind != Input::Kind::user || !input.dtype || std::ranges::find(left_out, i) != left_out.end()) continue;
    for (size_t dim = 0; dim < input.sizes.size(); ++dim) {
      const auto* other = std::get_if<SymbolicSize>(&input.sizes[dim]);
      if (other == nullptr || other->symbol != symbolic->symbol || other->factor != 1 || other->offset != 0) continue;
      return {{i, static_cast<int64_t>(dim)}};
    }
  }
  return {};
}

// A node that reads a size of a left-out input reads it from another input, if one has it; others stay as they are.
Node with_sizes_from_others(Node node, const ExportedProgram& program, const std::vector<size_t>& left_out) {
  if (node.target != "torch.ops.aten.sym_size.int" || node.arguments.size() != 2) return node;
  const ValueRef* self = node.arguments[0].argument.value();
  const auto* dim = std::get_if<c10::IValue>(&node.arguments[1].argument.what);
  if (self == nullptr || dim == nullptr || !dim->isInt()) return node;
  for (const size_t place : left_out) {
    const ValueRef* value = program.graph.inputs[place].value();
    const std::vector<Size>& sizes = program.inputs[place].sizes;
    const int64_t number = dim->toInt();
    if (value == nullptr || value->index != self->index || number < 0 || number >= std::ssize(sizes)) continue;
    const auto other = same_size(program, sizes[static_cast<size_t>(number)], left_out);
    if (!other) return node;
    node.arguments[0].argument = program.graph.inputs[other->first];
    node.arguments[1].argument = {c10::IValue(other->second)};
  }
  return node;
}

}  // namespace

GraphPart without_inputs(const ExportedProgram& program, const std::vector<size_t>& places) {
  const Graph& graph = program.graph;
  Aliases aliases(graph);
  std::vector<bool> is_left_out(graph.values.size());
  std::vector<size_t> changed;  // values that nodes without a place in the part write to
  const auto depends_on = [&](size_t value) {
    return is_left_out[value] ||
           std::ranges::any_of(changed, [&](size_t other) { return aliases.set_of(other) == aliases.set_of(value); });
  };
  const auto leave_out = [&](size_t value) { is_left_out[value] = true; };
  GraphPart part{.graph = {.values = graph.values, .inputs = graph.inputs, .outputs = {}, .nodes = {}}, .outputs = {}};
  for (const size_t place : places) for_each_value(graph.inputs[place], leave_out);
  for (const Node& whole : graph.nodes) {
    Node node = with_sizes_from_others(whole, program, places);
    aliases.add(node);
    if (std::ranges::none_of(values_of(node), depends_on)) {
      part.graph.nodes.push_back(std::move(node));
      continue;
    }
    for (const Argument& output : node.outputs) for_each_value(output, leave_out);
    for (const size_t value : written_by(node)) changed.push_back(value);
  }
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    if (std::ranges::any_of(values_of(graph.outputs[i]), depends_on)) continue;
    part.graph.outputs.push_back(graph.outputs[i]);
    part.outputs.push_back(i);
  }
  return part;
}

}  // namespace fulgur::program
