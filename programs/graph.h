#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <variant>
#include <vector>

namespace fulgur {

// The graph of a torch.export program, as the model.json of its archive describes it: operators in the order in which
// they run, between named values (tensors, sizes, flags). Source: torch/_export/serde/schema.py, major version 8.
namespace program {

// Refers to a value: its position in Graph::values.
struct ValueRef {
  size_t index;
};

struct Graph;
struct Argument;
using ArgumentList = std::vector<Argument>;

// What an operator is called with. Data types and devices are told apart from other constants, because a program may
// run in another precision and on another device than it was exported on.
struct Argument {
  std::variant<c10::IValue, at::ScalarType, c10::Device, ValueRef, ArgumentList, std::shared_ptr<const Graph>> what{};

  const ValueRef* value() const { return std::get_if<ValueRef>(&what); }
};

// Calls visit(index) for each value in an argument.
template <class Visit>
void for_each_value(const Argument& argument, const Visit& visit) {
  if (const ValueRef* value = argument.value()) visit(value->index);
  if (const auto* items = std::get_if<ArgumentList>(&argument.what)) {
    for (const Argument& item : *items) for_each_value(item, visit);
  }
}

struct NamedArgument {
  std::string name;  // as in the operator's schema; empty for higher-order operators
  Argument argument;
};

// A call of a module that an operator belongs to: "h.0.attn", and "h.0.attn@1" for the second call of it.
struct ModuleCall {
  std::string path;
  std::string call;
  std::string type;  // Python's class: "torch.nn.modules.activation.MultiheadAttention"
};

struct Node {
  std::string name;
  std::string target;  // "torch.ops.aten.linear.default", "_operator.mul"
  std::vector<NamedArgument> arguments;
  ArgumentList outputs;               // values, lists of values, or None for a result that nobody uses
  std::vector<ModuleCall> modules{};  // the calls that the operator is in, outermost first, without the root
};

struct Graph {
  std::vector<std::string> values;  // their names, each once
  ArgumentList inputs;              // values, or constants that were fixed at export
  ArgumentList outputs;             // values, constants or lists
  std::vector<Node> nodes;
};

// Reads "graph" of a model.json: each value must be defined once, and before it is used. Throws BadJson.
Graph parse_graph(const nlohmann::json& json);

// The data type that has this number in archives, which is not its number in c10. Throws BadJson if there is none.
at::ScalarType to_dtype(int64_t number);

}  // namespace program
}  // namespace fulgur
