#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
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

struct NamedArgument {
  std::string name;  // as in the operator's schema; empty for higher-order operators
  Argument argument;
};

// A call of a module that an operator belongs to: "h.0.attn", and "h.0.attn@1" for the second call of it.
struct ModuleCall {
  std::string path;
  std::string call;
};

struct Node {
  std::string name;
  std::string target;  // "torch.ops.aten.linear.default", "_operator.mul"
  std::vector<NamedArgument> arguments;
  ArgumentList outputs;               // values, lists of values, or None for a result that nobody uses
  std::vector<ModuleCall> modules{};  // the calls that it is in, from the outermost on, without the root
};

struct Graph {
  std::vector<std::string> values;  // their names, each once
  ArgumentList inputs;              // values, or constants that were fixed at export
  ArgumentList outputs;             // values, constants or lists
  std::vector<Node> nodes;
};

// factor * symbol + offset: the size of a dimension that was exported as Dim("n") has the factor 1 and the offset 0,
// and of one that was exported as 2 * Dim("n") + 1 it has 2 and 1.
struct SymbolicSize {
  std::string symbol;  // "s77"
  int64_t factor = 1, offset = 0;
};

// A size that is known, or depends on one symbol, or neither where the archive has another expression.
using Size = std::variant<std::monostate, int64_t, SymbolicSize>;

struct Input {
  enum class Kind { parameter, buffer, constant, user, fixed };
  Kind kind;
  std::string name;                       // Python's name
  bool is_persistent = true;              // for a buffer
  std::optional<at::ScalarType> dtype{};  // what a user's tensor must be; null: a number
  std::vector<Size> sizes{};              // what a user's tensor must have; a size alone: what a number must be

  bool is_weight() const { return kind == Kind::parameter || (kind == Kind::buffer && is_persistent); }
  bool is_constant() const { return kind == Kind::constant || (kind == Kind::buffer && !is_persistent); }
};

struct Output {
  enum class Kind { user, buffer_mutation };
  Kind kind;
  std::string name;  // a user's output: its key in Python ("logits"), its place ("0", "1.0"), or "output" if there is
                     // one tensor alone; otherwise the buffer that the value is copied to
};

struct Range {
  std::optional<int64_t> min{}, max{};  // both included; null: no limit
};

struct ExportedProgram {
  std::string torch_version;
  Graph graph{};
  std::vector<Input> inputs{};            // in the order of graph.inputs
  std::vector<Output> outputs{};          // in the order of graph.outputs
  std::map<std::string, Range> ranges{};  // the sizes that each symbol may have

  // The names of the user's tensors and numbers, without those that were fixed at export.
  std::vector<std::string> input_names() const;
  std::vector<std::string> output_names() const;
};

// Checks everything that running the graph relies on: each value is defined once, and before it is used. Throws
// CheckpointError that names `file` and the place for a text that torch.export would not write, a schema of another
// major version, and what is not supported (custom objects, tokens).
ExportedProgram parse_program(std::string_view model_json, std::string_view file);

// The names of the inputs and outputs in the specification of a call (pytree's JSON) that a package of AOTInductor has:
// keywords by their names, and positional arguments, whose names it lacks, by their places. Throws CheckpointError that
// names `file`.
struct CallNames {
  std::vector<std::string> inputs, outputs;
};
CallNames parse_call_names(std::string_view in_spec, std::string_view out_spec, std::string_view file);

// The data type that has this number in archives, which is not its number in c10. Throws BadJson if there is none.
at::ScalarType to_dtype(int64_t number);

}  // namespace program
}  // namespace fulgur
