#include "fulgur/programs/graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur::program {
namespace {

using Json = nlohmann::json;

constexpr int64_t kSchemaMajor = 8;
constexpr JsonLimits kJsonLimits{.max_depth = 128, .max_values = 20'000'000};
constexpr int kMaxGraphDepth = 16;  // graphs of higher-order operators within each other
constexpr int64_t kMaxModuleDepth = 64;

// Reads a member of an object, or says what is missing.
const Json& member(const Json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end()) throw BadJson(fmt::format("'{}' is missing", name));
  return *found;
}

const Json& array(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_array()) throw BadJson(fmt::format("'{}' is no array", name));
  return value;
}

const Json& object(const Json& parent, const char* name) {
  const Json& value = member(parent, name);
  if (!value.is_object()) throw BadJson(fmt::format("'{}' is no object", name));
  return value;
}

const std::string& to_text(const Json& value) {
  if (!value.is_string()) throw BadJson(fmt::format("{} is no text", quote(value.dump())));
  return value.get_ref<const std::string&>();
}

const std::string& text(const Json& object, const char* name) { return to_text(member(object, name)); }

int64_t to_int(const Json& value) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= std::numeric_limits<int64_t>::max());
  if (!fits) throw BadJson(fmt::format("{} is no whole number of 64 bits", quote(value.dump())));
  return value.get<int64_t>();
}

double to_double(const Json& value) {
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) throw BadJson(fmt::format("{} is no number", quote(value.dump())));
  return value.get<double>();
}

bool to_bool(const Json& value) {
  if (!value.is_boolean()) throw BadJson(fmt::format("{} is neither true nor false", quote(value.dump())));
  return value.get<bool>();
}

// The one member of an object that holds one of several kinds of value: {"as_int": 3}.
std::pair<std::string, const Json*> the_member(const Json& choice) {
  if (!choice.is_object() || choice.size() != 1) {
    throw BadJson(fmt::format("{} has not one member", quote(choice.dump())));
  }
  return {choice.begin().key(), &choice.begin().value()};
}

at::MemoryFormat to_memory_format(int64_t number) {
  switch (number) {
    case 1:
      return at::MemoryFormat::Contiguous;
    case 2:
      return at::MemoryFormat::ChannelsLast;
    case 3:
      return at::MemoryFormat::ChannelsLast3d;
    case 4:
      return at::MemoryFormat::Preserve;
    default:
      throw BadJson(fmt::format("memory format {} is unknown", number));
  }
}

at::Layout to_layout(int64_t number) {
  if (number != 7) throw BadJson(fmt::format("layout {} is not supported; only strided tensors (7) are", number));
  return at::kStrided;
}

c10::Device to_device(const Json& json) {
  const Json& index = member(json, "index");
  const std::string name = text(json, "type");
  try {
    const c10::Device device(name);
    return index.is_null() ? device : c10::Device(device.type(), static_cast<c10::DeviceIndex>(to_int(index)));
  } catch (const c10::Error&) {
    throw BadJson(fmt::format("device {} is unknown", quote(name)));
  }
}

// A path of modules, such as "layers.0", or the name of a tensor in one. Each part becomes a module within the last.
void check_path(const std::string& path) {
  if (path.starts_with('.') || path.ends_with('.') || path.find("..") != path.npos) {
    throw BadJson(fmt::format("{} is no path of modules: a part is empty", quote(path)));
  }
  if (std::ranges::count(path, '.') >= kMaxModuleDepth) {
    throw BadJson(fmt::format("{} is a module more than {} deep", quote(path), kMaxModuleDepth));
  }
}

// "L__self__,,M;L__self__h.0@1,h.0,Block" as the calls of modules after the root's.
std::vector<ModuleCall> to_modules(const std::string& stack) {
  std::vector<ModuleCall> modules;
  for (size_t begin = 0; begin < stack.size();) {
    const size_t end = std::min(stack.find(';', begin), stack.size());
    const std::string entry = stack.substr(begin, end - begin);
    const size_t first = entry.find(','), second = first == entry.npos ? first : entry.find(',', first + 1);
    if (second == entry.npos) throw BadJson(fmt::format("{} is no call of a module", quote(entry)));
    const std::string key = entry.substr(0, first), path = entry.substr(first + 1, second - first - 1);
    if (!path.empty() && path != key) {
      check_path(path);
      modules.push_back({.path = path, .call = key});
    }
    begin = end + 1;
  }
  return modules;
}

class GraphParser {
 public:
  explicit GraphParser(int depth) : depth_(depth) {
    if (depth > kMaxGraphDepth)
      throw BadJson(fmt::format("graphs lie in each other more than {} deep", kMaxGraphDepth));
  }

  Graph parse(const Json& json) {
    for (const Json& input : array(json, "inputs")) graph_.inputs.push_back(input_of(input));
    for (const Json& node : array(json, "nodes")) graph_.nodes.push_back(node_of(node));
    for (const Json& output : array(json, "outputs")) graph_.outputs.push_back(argument(output));
    return std::move(graph_);
  }

 private:
  Argument define(const std::string& name) {
    if (!indices_.emplace(name, graph_.values.size()).second) {
      throw BadJson(fmt::format("value {} is defined twice", quote(name)));
    }
    graph_.values.push_back(name);
    return {ValueRef{graph_.values.size() - 1}};
  }

  Argument use(const std::string& name) const {
    const auto found = indices_.find(name);
    if (found == indices_.end()) throw BadJson(fmt::format("value {} is used before it is defined", quote(name)));
    return {ValueRef{found->second}};
  }

  Argument input_of(const Json& json) {
    const auto [kind, value] = the_member(json);
    if (kind == "as_tensor") return define(text(*value, "name"));
    if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") return define(text(*value, "as_name"));
    return argument(json);
  }

  Node node_of(const Json& json) {
    Node node{.name = "", .target = text(json, "target"), .arguments = {}, .outputs = {}};
    if (const auto name = json.find("name"); name != json.end() && name->is_string()) node.name = to_text(*name);
    try {
      for (const Json& input : array(json, "inputs")) {
        node.arguments.push_back({.name = text(input, "name"), .argument = argument(member(input, "arg"))});
      }
      for (const Json& output : array(json, "outputs")) node.outputs.push_back(output_of(output));
      const Json& metadata = object(json, "metadata");
      const auto stack = metadata.find("nn_module_stack");
      if (stack != metadata.end()) node.modules = to_modules(to_text(*stack));
    } catch (const BadJson& error) {
      throw BadJson(fmt::format("node {} ({}): {}", quote(node.name), quote(node.target), error.what()));
    }
    return node;
  }

  Argument output_of(const Json& json) {
    const auto [kind, value] = the_member(json);
    if (kind == "as_none") return {};
    if (kind == "as_tensors") return list(*value, [&](const Json& item) { return define(text(item, "name")); });
    if (kind == "as_optional_tensors") return list(*value, [&](const Json& item) { return output_of(item); });
    if (kind == "as_optional_tensor") return output_of(*value);
    if (kind == "as_tensor" || kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") {
      return input_of(json);
    }
    throw BadJson(fmt::format("results of kind '{}' are not supported", kind));
  }

  template <class Item>
  static Argument list(const Json& json, const Item& item) {
    if (!json.is_array()) throw BadJson(fmt::format("{} is no array", quote(json.dump())));
    ArgumentList items;
    for (const Json& each : json) items.push_back(item(each));
    return {std::move(items)};
  }

  Argument argument(const Json& json) const {
    const auto [kind, found] = the_member(json);
    const Json& value = *found;
    const auto used = [this](const Json& item) { return use(text(item, "name")); };
    const auto itself = [this](const Json& item) { return argument(item); };
    if (kind == "as_none") return {};
    if (kind == "as_tensor") return used(value);
    if (kind == "as_name") return use(to_text(value));
    if (kind == "as_int") return {c10::IValue(to_int(value))};
    if (kind == "as_float") return {c10::IValue(to_double(value))};
    if (kind == "as_bool") return {c10::IValue(to_bool(value))};
    if (kind == "as_string") return {c10::IValue(to_text(value))};
    if (kind == "as_complex") {
      return {c10::IValue(c10::complex<double>(to_double(member(value, "real")), to_double(member(value, "imag"))))};
    }
    if (kind == "as_scalar_type") return {to_dtype(to_int(value))};
    if (kind == "as_memory_format") return {c10::IValue(to_memory_format(to_int(value)))};
    if (kind == "as_layout") return {c10::IValue(to_layout(to_int(value)))};
    if (kind == "as_device") return {to_device(value)};
    if (kind == "as_tensors") return list(value, used);
    if (kind == "as_ints") return list(value, [](const Json& item) -> Argument { return {c10::IValue(to_int(item))}; });
    if (kind == "as_floats") {
      return list(value, [](const Json& item) -> Argument { return {c10::IValue(to_double(item))}; });
    }
    if (kind == "as_bools") {
      return list(value, [](const Json& item) -> Argument { return {c10::IValue(to_bool(item))}; });
    }
    if (kind == "as_strings") {
      return list(value, [](const Json& item) -> Argument { return {c10::IValue(to_text(item))}; });
    }
    if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool" || kind == "as_optional_tensor") {
      return argument(value);
    }
    if (kind == "as_sym_ints" || kind == "as_sym_floats" || kind == "as_sym_bools" || kind == "as_optional_tensors") {
      return list(value, itself);
    }
    if (kind == "as_graph") {
      return {std::make_shared<const Graph>(GraphParser(depth_ + 1).parse(member(value, "graph")))};
    }
    throw BadJson(fmt::format("arguments of kind '{}' are not supported", kind));
  }

  const int depth_;
  Graph graph_;
  std::map<std::string, size_t> indices_;
};

// Reads what sympy.srepr() writes of a linear expression of one symbol:
//   Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(1))
class SizeExpression {
 public:
  explicit SizeExpression(std::string_view text) : text_(text) {}

  // Nothing for any other expression, and for numbers that no size has.
  std::optional<SymbolicSize> parse() {
    constexpr int64_t kMost = int64_t{1} << 40;
    std::optional<SymbolicSize> size = term();
    if (!size || !text_.empty() || size->symbol.empty()) return {};
    const bool is_plausible = 0 < size->factor && size->factor < kMost && -kMost < size->offset && size->offset < kMost;
    return is_plausible ? size : std::nullopt;
  }

 private:
  static constexpr int kMaxDepth = 8;

  std::optional<SymbolicSize> term() {
    if (take("Integer(")) return number();
    if (take("Symbol('")) return symbol();
    if (depth_ == kMaxDepth) return {};
    ++depth_;
    std::optional<SymbolicSize> result;
    if (take("Add(")) {
      result = operands(add);
    } else if (take("Mul(")) {
      result = operands(multiply);
    }
    --depth_;
    return result;
  }

  std::optional<SymbolicSize> operands(std::optional<SymbolicSize> (*combine)(const SymbolicSize&,
                                                                              const SymbolicSize&)) {
    std::optional<SymbolicSize> all = term();
    while (all && take(", ")) {
      const std::optional<SymbolicSize> next = term();
      all = next ? combine(*all, *next) : std::nullopt;
    }
    return take(")") ? all : std::nullopt;
  }

  static std::optional<SymbolicSize> add(const SymbolicSize& a, const SymbolicSize& b) {
    if (!a.symbol.empty() && !b.symbol.empty()) return {};
    const SymbolicSize& symbolic = a.symbol.empty() ? b : a;
    SymbolicSize sum{.symbol = symbolic.symbol, .factor = symbolic.factor};
    return __builtin_add_overflow(a.offset, b.offset, &sum.offset) ? std::nullopt : std::optional(sum);
  }

  static std::optional<SymbolicSize> multiply(const SymbolicSize& a, const SymbolicSize& b) {
    if (!a.symbol.empty() && !b.symbol.empty()) return {};
    const SymbolicSize& symbolic = a.symbol.empty() ? b : a;
    const int64_t number = a.symbol.empty() ? a.offset : b.offset;
    SymbolicSize product{.symbol = symbolic.symbol};
    const bool overflows = __builtin_mul_overflow(symbolic.factor, number, &product.factor) ||
                           __builtin_mul_overflow(symbolic.offset, number, &product.offset);
    return overflows ? std::nullopt : std::optional(product);
  }

  std::optional<SymbolicSize> number() {
    SymbolicSize number{.symbol = "", .factor = 0};
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), number.offset);
    if (error != std::errc()) return {};
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return take(")") ? std::optional(number) : std::nullopt;
  }

  std::optional<SymbolicSize> symbol() {
    const size_t quote = text_.find('\''), end = text_.find(')');
    if (quote == 0 || quote == text_.npos || end == text_.npos || end < quote) return {};
    SymbolicSize symbol{.symbol = std::string(text_.substr(0, quote))};
    text_.remove_prefix(end + 1);
    return symbol;
  }

  bool take(std::string_view token) {
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }

  std::string_view text_;  // what is left of it
  int depth_ = 0;
};

Size to_size(const Json& json) {
  const auto [kind, value] = the_member(json);
  if (kind == "as_int") return to_int(*value);
  const std::optional<SymbolicSize> size = SizeExpression(text(*value, "expr_str")).parse();
  return size ? Size(*size) : Size();
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
    const std::string own = has_names && keys[i].is_string() ? keys[i].get<std::string>() : std::to_string(i);
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

// The type of a user's input, and the sizes of a tensor, or the one of a number that is a size.
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
      if (value != nullptr) describe(input, array(json, "inputs")[inputs.size()], json);
    } else {
      throw BadJson(fmt::format("inputs of kind '{}' are not supported", kind));
    }
    if (input.kind == Input::Kind::parameter || input.kind == Input::Kind::buffer) check_path(input.name);
    if (value == nullptr && input.kind != Input::Kind::fixed) {
      throw BadJson(fmt::format("input {} of the graph is no value", quote(input.name)));
    }
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

at::ScalarType to_dtype(int64_t number) {
  switch (number) {
    case 1:
      return at::kByte;
    case 2:
      return at::kChar;
    case 3:
      return at::kShort;
    case 4:
      return at::kInt;
    case 5:
      return at::kLong;
    case 6:
      return at::kHalf;
    case 7:
      return at::kFloat;
    case 8:
      return at::kDouble;
    case 9:
      return at::kComplexHalf;
    case 10:
      return at::kComplexFloat;
    case 11:
      return at::kComplexDouble;
    case 12:
      return at::kBool;
    case 13:
      return at::kBFloat16;
    case 28:
      return at::kUInt16;
    case 29:
      return at::kFloat8_e4m3fn;
    case 30:
      return at::kFloat8_e5m2;
    case 31:
      return at::kFloat8_e4m3fnuz;
    case 32:
      return at::kFloat8_e5m2fnuz;
    default:
      throw BadJson(fmt::format("data type {} is unknown", number));
  }
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
    program.graph = GraphParser(0).parse(object(module, "graph"));
    program.inputs = parse_inputs(module, program.graph);
    program.outputs = parse_outputs(module, program.graph);
    program.ranges = parse_ranges(object(json, "range_constraints"));
    for (const Output& output : program.outputs) check_buffer(output, program.inputs);
    check_names(program.inputs, "inputs");
    check_names(program.outputs, "outputs");
    return program;
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace fulgur::program
