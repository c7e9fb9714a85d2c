#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fulgur/programs/graph.h"
#include "fulgur/programs/size_expression.h"
#include "fulgur/programs/size_guard.h"

namespace fulgur::program {

// A size: a number, a linear function of one symbol, or monostate if the archive has another expression.
using Size = std::variant<std::monostate, int64_t, SymbolicSize>;

struct Input {
  enum class Kind { parameter, buffer, constant, user, fixed };
  Kind kind;
  std::string name;                       // Python's name
  bool is_persistent = true;              // for a buffer
  std::optional<at::ScalarType> dtype{};  // data type of a tensor; null: the input is a number
  std::vector<Size> sizes{};              // sizes of a tensor; for a number: empty, or the one value that it must have

  std::vector<int64_t> fixed_sizes() const;  // for a weight, whose sizes are all known
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
  std::vector<Input> inputs{};               // in the order of graph.inputs
  std::vector<Output> outputs{};             // in the order of graph.outputs
  std::map<std::string, Range> ranges{};     // the sizes that each symbol may have
  std::vector<SizeGuard> guards{};           // conditions on sizes of tensors of the user, each of which is there
  std::vector<std::string> unread_guards{};  // the text of other conditions, which nothing checks

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

}  // namespace fulgur::program
