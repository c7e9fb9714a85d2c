#include "fulgur/programs/exported_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/programs/json_members.h"

namespace fulgur::program {
namespace {

using Json = nlohmann::json;

constexpr int64_t kSchemaMajor = 8;
constexpr JsonLimits kJsonLimits{.max_depth = 128, .max_values = 20'000'000};

Size to_size(const Json& json) {
  const auto [kind, value] = the_member(json);
  if (kind == "as_int") return to_int(*value);
  const std::optional<SymbolicSize> size = parse_size_expression(text(*value, "expr_str"));
  return size ? Size(*size) : Size();
}

// A key of a dict as Python's str() writes it; nothing for one that is no text, number, truth value or None.
std::optional<std::string> to_key(const Json& key) {
  if (key.is_string()) return key.get<std::string>();
  if (key.is_boolean()) return key.get<bool>() ? "True" : "False";
  if (key.is_null()) return "None";
  return key.is_number() ? std::optional(key.dump()) : std::nullopt;
}

// The names of the leaves of a tree of Python's containers: "logits" in a dict, "0" in a tuple, "past.1" deeper.
void add_leaf_names(const Json& spec, const std::string& prefix, std::vector<std::string>& names) {
  const Json& children = array(spec, "children_spec");
  const Json& type = member(spec, "type");
  if (type.is_null()) {
    names.push_back(prefix);
    return;
  }
  const std::string context = member(spec, "context").is_string() ? text(spec, "context") : "";
  const Json keys = Json::parse(context, nullptr, /*allow_exceptions=*/false);
  const bool has_names = keys.is_array() && keys.size() == children.size();
  for (size_t i = 0; i < children.size(); ++i) {
    const std::string own = (has_names ? to_key(keys[i]) : std::nullopt).value_or(std::to_string(i));
    add_leaf_names(children[i], prefix.empty() ? own : prefix + '.' + own, names);
  }
}

// JSON in a text of JSON.
Json parse_inner(const std::string& text, const char* name) {
  try {
    return parse_json(text, name, kJsonLimits);
  } catch (const CheckpointError& error) {
    throw BadJson(error.what());
  }
}

// The tree of a "[1, {...}]" in the signature of the root module.
Json to_spec(const std::string& text, const char* name) {
  const Json spec = parse_inner(text, name);
  if (!spec.is_array() || spec.size() != 2) throw BadJson(fmt::format("'{}' is unreadable", name));
  return spec[1];
}

const Json* root_signature(const Json& module) {
  for (const Json& entry : array(module, "module_call_graph")) {
    if (text(entry, "fqn").empty() && !member(entry, "signature").is_null()) return &entry["signature"];
  }
  return nullptr;
}

// The user's inputs in the order of the graph: positional ones by the names of forward's arguments, then keywords.
std::vector<std::string> input_names(const std::string& in_spec, const Json& argument_names) {
  const Json spec = to_spec(in_spec, "in_spec");
  const Json& children = array(spec, "children_spec");
  if (children.size() != 2) return {};
  std::vector<std::string> names;
  const Json& positional = array(children[0], "children_spec");
  for (size_t i = 0; i < positional.size(); ++i) {
    const bool is_named = argument_names.is_array() && i < argument_names.size() && argument_names[i].is_string();
    add_leaf_names(positional[i], is_named ? argument_names[i].get<std::string>() : std::to_string(i), names);
  }
  add_leaf_names(children[1], "", names);
  return names;
}

std::vector<std::string> output_names(const std::string& out_spec) {
  std::vector<std::string> names;
  add_leaf_names(to_spec(out_spec, "out_spec"), "", names);
  if (names.size() == 1 && names.front().empty()) names.front() = "output";
  return names;
}

// Takes the names of leaves in their order; without a name, falls back to the graph's.
class NamesInOrder {
 public:
  NamesInOrder(std::vector<std::string> names, size_t num_leaves) {
    if (names.size() == num_leaves) names_ = std::move(names);
  }
  std::string next(const std::string& otherwise) { return names_.empty() ? otherwise : names_.at(next_++); }

 private:
  std::vector<std::string> names_;
  size_t next_ = 0;
};

// The type and sizes of an input that is a tensor, or the size that a number is.
void describe(Input& input, const Json& graph_input, const Json& graph) {
  const auto [kind, value] = the_member(graph_input);
  const auto described = [&](const char* where, const std::string& name) -> const Json& {
    return member(object(graph, where), name.c_str());
  };
  if (kind == "as_tensor") {
    const Json& tensor = described("tensor_values", text(*value, "name"));
    input.dtype = to_dtype(to_int(member(tensor, "dtype")));
    for (const Json& size : array(tensor, "sizes")) input.sizes.push_back(to_size(size));
  } else if (kind == "as_sym_int") {
    input.sizes.push_back(to_size(described("sym_int_values", text(*value, "as_name"))));
  }
}

bool is_fixed(const Size& size) { return std::holds_alternative<int64_t>(size); }

std::vector<Input> parse_inputs(const Json& module, const Graph& graph) {
  const Json& specs = array(object(module, "signature"), "input_specs");
  const Json& json = object(module, "graph");
  if (specs.size() != graph.inputs.size()) throw BadJson("the signature has other inputs than the graph");
  const auto is_leaf = [](const Json& spec) { return spec.contains("user_input") || spec.contains("constant_input"); };
  const Json* signature = root_signature(module);
  std::vector<std::string> of_call;
  if (signature != nullptr) {
    of_call = input_names(text(*signature, "in_spec"), signature->value("forward_arg_names", Json()));
  }
  NamesInOrder names(std::move(of_call), static_cast<size_t>(std::count_if(specs.begin(), specs.end(), is_leaf)));
  std::vector<Input> inputs;
  for (const Json& choice : specs) {
    const auto [kind, spec] = the_member(choice);
    const ValueRef* value = graph.inputs[inputs.size()].value();
    const std::string of_graph = value == nullptr ? "" : graph.values[value->index];
    Input input{.kind = Input::Kind::user, .name = of_graph};
    if (kind == "parameter") {
      input.kind = Input::Kind::parameter;
      input.name = text(*spec, "parameter_name");
    } else if (kind == "buffer") {
      input.kind = Input::Kind::buffer;
      input.name = text(*spec, "buffer_name");
      input.is_persistent = to_bool(member(*spec, "persistent"));
    } else if (kind == "tensor_constant") {
      input.kind = Input::Kind::constant;
      input.name = text(*spec, "tensor_constant_name");
    } else if (kind == "constant_input") {
      input.kind = Input::Kind::fixed;
      input.name = names.next(text(*spec, "name"));
    } else if (kind == "user_input") {
      input.name = names.next(of_graph);
      if (value == nullptr) input.kind = Input::Kind::fixed;
    } else {
      throw BadJson(fmt::format("inputs of kind '{}' are not supported", kind));
    }
    if (input.kind == Input::Kind::parameter || input.kind == Input::Kind::buffer) check_path(input.name);
    if (value == nullptr && input.kind != Input::Kind::fixed) {
      throw BadJson(fmt::format("input {} of the graph is no value", quote(input.name)));
    }
    if (value != nullptr) describe(input, array(json, "inputs")[inputs.size()], json);
    const bool is_known = std::ranges::all_of(input.sizes, is_fixed);
    if (input.is_weight() && !is_known) throw BadJson(fmt::format("the sizes of {} are unknown", quote(input.name)));
    inputs.push_back(std::move(input));
  }
  return inputs;
}

std::vector<Output> parse_outputs(const Json& module, const Graph& graph) {
  const Json& specs = array(object(module, "signature"), "output_specs");
  if (specs.size() != graph.outputs.size()) throw BadJson("the signature has other outputs than the graph");
  const auto is_leaf = [](const Json& spec) { return spec.contains("user_output"); };
  const auto num_leaves = static_cast<size_t>(std::count_if(specs.begin(), specs.end(), is_leaf));
  const Json* signature = root_signature(module);
  NamesInOrder names(signature == nullptr ? std::vector<std::string>() : output_names(text(*signature, "out_spec")),
                     num_leaves);
  std::vector<Output> outputs;
  for (const Json& choice : specs) {
    const auto [kind, spec] = the_member(choice);
    if (kind == "user_output") {
      outputs.push_back({.kind = Output::Kind::user, .name = names.next(std::to_string(outputs.size()))});
    } else if (kind == "buffer_mutation") {
      outputs.push_back({.kind = Output::Kind::buffer_mutation, .name = text(*spec, "buffer_name")});
    } else {
      throw BadJson(fmt::format("outputs of kind '{}' are not supported", kind));
    }
  }
  return outputs;
}

std::map<std::string, Range> parse_ranges(const Json& constraints) {
  std::map<std::string, Range> ranges;
  for (const auto& [symbol, json] : constraints.items()) {
    const auto limit = [&, &range = json](const char* name) -> std::optional<int64_t> {
      const Json& value = member(range, name);
      return value.is_null() ? std::nullopt : std::optional(to_int(value));
    };
    ranges[symbol] = {.min = limit("min_val"), .max = limit("max_val")};
  }
  return ranges;
}

// Conditions that torch.export has written beside the graph; older files have none.
void parse_guards(const Json& json, ExportedProgram& program) {
  const auto texts = json.find("guards_code");
  if (texts == json.end() || texts->is_null()) return;
  const auto is_there = [&](const SizeGuard::InputSize& size) {
    return std::ranges::any_of(program.inputs, [&](const Input& input) {
      return input.kind == Input::Kind::user && input.dtype && input.name == size.input &&
             size.dim < input.sizes.size();
    });
  };
  for (const Json& item : array(json, "guards_code")) {
    std::optional<SizeGuard> guard = SizeGuard::parse(to_text(item));
    if (guard && std::ranges::all_of(guard->sizes(), is_there)) {
      program.guards.push_back(std::move(*guard));
    } else {
      program.unread_guards.push_back(to_text(item));
    }
  }
}

void check_buffer(const Output& output, const std::vector<Input>& inputs) {
  const auto is_it = [&](const Input& input) { return input.kind == Input::Kind::buffer && input.name == output.name; };
  if (output.kind == Output::Kind::user || std::any_of(inputs.begin(), inputs.end(), is_it)) return;
  throw BadJson(fmt::format("a result goes to buffer {}, which is no input", quote(output.name)));
}

// Parameters and buffers share their names, as in a module of Python.
Input::Kind namespace_of(const Input& input) {
  return input.kind == Input::Kind::buffer ? Input::Kind::parameter : input.kind;
}
Output::Kind namespace_of(const Output& output) { return output.kind; }

template <class Items, class Kind>
std::vector<std::string> names_of(const Items& items, Kind kind) {
  std::vector<std::string> names;
  for (const auto& item : items) {
    if (item.kind == kind) names.push_back(item.name);
  }
  return names;
}

// No name of two user's inputs, of two outputs, is the same.
template <class Items>
void check_names(const Items& items, std::string_view what) {
  std::set<std::pair<int, std::string>> names;
  for (const auto& item : items) {
    if (!names.emplace(static_cast<int>(namespace_of(item)), item.name).second) {
      throw BadJson(fmt::format("two {} are called {}", what, quote(item.name)));
    }
  }
}

}  // namespace

std::vector<int64_t> Input::fixed_sizes() const {
  std::vector<int64_t> fixed;
  for (const Size& size : sizes) fixed.push_back(std::get<int64_t>(size));
  return fixed;
}

std::vector<std::string> ExportedProgram::input_names() const { return names_of(inputs, Input::Kind::user); }

std::vector<std::string> ExportedProgram::output_names() const { return names_of(outputs, Output::Kind::user); }

CallNames parse_call_names(std::string_view in_spec, std::string_view out_spec, std::string_view file) {
  try {
    return {.inputs = input_names(std::string(in_spec), Json()), .outputs = output_names(std::string(out_spec))};
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

ExportedProgram parse_program(std::string_view model_json, std::string_view file) {
  const Json json = parse_json(model_json, file, kJsonLimits);
  try {
    const int64_t major = to_int(member(member(json, "schema_version"), "major"));
    ExportedProgram program{.torch_version = text(json, "torch_version")};
    if (major != kSchemaMajor) {
      throw BadJson(
          fmt::format("written by torch {} with schema version {}, but version {}, that of torch 2.11, is read: "
                      "export the program again",
                      quote(program.torch_version), major, kSchemaMajor));
    }
    const Json& module = object(json, "graph_module");
    program.graph = parse_graph(object(module, "graph"));
    program.inputs = parse_inputs(module, program.graph);
    program.outputs = parse_outputs(module, program.graph);
    program.ranges = parse_ranges(object(json, "range_constraints"));
    parse_guards(json, program);
    for (const Output& output : program.outputs) check_buffer(output, program.inputs);
    check_names(program.inputs, "inputs");
    check_names(program.outputs, "outputs");
    return program;
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace fulgur::program
