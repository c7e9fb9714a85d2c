#include "fulgur/programs/graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/programs/json_members.h"

namespace fulgur::program {
namespace {

using Json = nlohmann::json;

constexpr int kMaxGraphDepth = 16;  // graphs of higher-order operators within each other

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
      modules.push_back({.path = path, .call = key, .type = entry.substr(second + 1)});
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

Graph parse_graph(const Json& json) { return GraphParser(0).parse(json); }

}  // namespace fulgur::program
