#include "fulgur/programs/exported_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "tests/programs/archive_file.h"
#include "tests/testing/errors.h"

namespace fulgur::program {
namespace {

using Json = nlohmann::json;
using testing::ArchiveFile;
using testing::argument_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::node_of;

ExportedProgram read(ArchiveFile file) { return parse_program(file.entries.at("models/model.json"), "file"); }

std::string refusal_of(const std::string& text) {
  const std::string message = testing::message_of<CheckpointError>([&] { parse_program(text, "file"); });
  EXPECT_THAT(message, ::testing::StartsWith("file: "));
  return message.substr(std::min<size_t>(message.size(), 6));
}

// What is wrong with an archive's program after a change.
std::string refusal(const std::string& archive, const ArchiveFile::Change& change) {
  return refusal_of(ArchiveFile(archive).change_program(change).entries.at("models/model.json"));
}

Json& graph_of(Json& program) { return program["graph_module"]["graph"]; }
Json& signature_of(Json& program) { return program["graph_module"]["signature"]; }

std::vector<std::string> names_of(const auto& items) {
  std::vector<std::string> names;
  for (const auto& item : items) names.push_back(item.name);
  return names;
}

TEST(Graph, HasTheValuesAndNodesInOrder) {
  const ExportedProgram program = read(ArchiveFile("tiny"));
  EXPECT_THAT(program.graph.values, ElementsAre("p_hidden_weight", "p_hidden_bias", "p_out_weight", "p_out_bias", "x",
                                                "linear", "tanh", "linear_1"));
  ASSERT_EQ(program.graph.nodes.size(), 3u);
  const Node& node = program.graph.nodes[2];
  EXPECT_EQ(node.name, "linear_1");
  EXPECT_EQ(node.target, "torch.ops.aten.linear.default");
  EXPECT_THAT(names_of(node.arguments), ElementsAre("input", "weight", "bias"));
  EXPECT_EQ(node.arguments[0].argument.value()->index, 6u);
  ASSERT_EQ(node.modules.size(), 1u);
  EXPECT_EQ(node.modules[0].path, "out");
  EXPECT_EQ(program.graph.outputs.at(0).value()->index, 7u);
  EXPECT_EQ(program.inputs.back().kind, Input::Kind::user);
  EXPECT_EQ(program.inputs.back().dtype, at::kFloat);
  const std::string symbol = std::get<program::SymbolicSize>(program.inputs.back().sizes.at(0)).symbol;
  EXPECT_EQ(std::get<int64_t>(program.inputs.back().sizes.at(1)), 4);
  EXPECT_EQ(program.ranges.at(symbol).max, std::nullopt);
}

TEST(Graph, InputsAndOutputsHaveTheNamesOfPython) {
  const ExportedProgram mlp = read(ArchiveFile("mlp")), sizes = read(ArchiveFile("sizes"));
  EXPECT_THAT(names_of(mlp.outputs), ElementsAre("features", "logits"));
  EXPECT_THAT(names_of(sizes.outputs), ElementsAre("0", "1.0", "1.1", "2"));
  EXPECT_THAT(names_of(sizes.inputs), ElementsAre("table", "offset", "left", "right"));
  EXPECT_FALSE(sizes.inputs[0].is_persistent);
  EXPECT_EQ(sizes.inputs[1].kind, Input::Kind::constant);
  EXPECT_THAT(names_of(read(ArchiveFile("tiny")).outputs), ElementsAre("output"));
}

TEST(Graph, KeysOfADictThatAreNoTextAreNamesAsInPython) {
  const CallNames names = parse_call_names(
      R"([1, {"type": "builtins.tuple", "context": "null", "children_spec": [
          {"type": "builtins.tuple", "context": "null", "children_spec": []},
          {"type": "builtins.dict", "context": "[\"x\", \"more\"]", "children_spec": [
            {"type": null, "context": null, "children_spec": []},
            {"type": "builtins.dict", "context": "[7, true]", "children_spec": [
              {"type": null, "context": null, "children_spec": []},
              {"type": null, "context": null, "children_spec": []}]}]}]}])",
      R"([1, {"type": "builtins.dict", "context": "[2, 1]", "children_spec": [
          {"type": null, "context": null, "children_spec": []},
          {"type": null, "context": null, "children_spec": []}]}])",
      "file");
  EXPECT_THAT(names.inputs, ElementsAre("x", "more.7", "more.True"));
  EXPECT_THAT(names.outputs, ElementsAre("2", "1"));
}

TEST(Graph, ANumberMayBeAnInput) {
  const auto change = [](Json& program) {
    graph_of(program)["inputs"].push_back({{"as_sym_int", {{"as_name", "n"}}}});
    graph_of(program)["sym_int_values"]["n"] = {{"as_expr", {{"expr_str", "Symbol('s86', integer=True)"}}}};
    signature_of(program)["input_specs"].push_back({{"user_input", {{"arg", {{"as_sym_int", {{"as_name", "n"}}}}}}}});
  };
  const Input input = read(ArchiveFile("tiny").change_program(change)).inputs.back();
  EXPECT_EQ(input.name, "n");
  EXPECT_EQ(input.dtype, std::nullopt);
  ASSERT_EQ(input.sizes.size(), 1u);
  EXPECT_EQ(std::get<program::SymbolicSize>(input.sizes[0]).symbol, "s86");
}

TEST(Graph, RefusesOtherVersionsOfTheSchema) {
  for (const int version : {7, 9}) {
    EXPECT_THAT(refusal("tiny", [&](Json& program) { program["schema_version"]["major"] = version; }),
                ::testing::MatchesRegex("written by torch '2.11.0.*' with schema version " + std::to_string(version) +
                                        ", but version 8, that of torch 2.11, is read: export the program again"));
  }
  EXPECT_NO_THROW(read(ArchiveFile("tiny").change_program([](Json& p) { p["schema_version"]["minor"] = 99; })));
  EXPECT_EQ(refusal("tiny", [](Json& program) { program.erase("schema_version"); }), "'schema_version' is missing");
}

TEST(Graph, RefusesWhatIsNoJsonOfAProgram) {
  EXPECT_THAT(refusal_of("no json"), HasSubstr("is not JSON"));
  EXPECT_EQ(refusal_of("[]"), "'schema_version' is missing");
  EXPECT_EQ(refusal_of(std::string(200, '[') + std::string(200, ']')), "nested more than 128 deep");
  EXPECT_EQ(refusal_of(R"({"a": 1, "a": 2})"), "the name 'a' is there twice");
  const std::string whole = ArchiveFile("tiny").entries.at("models/model.json");
  EXPECT_THAT(refusal_of(whole.substr(0, whole.size() / 2)), HasSubstr("is not JSON"));
}

TEST(Graph, RefusesAFileWithoutOneOfItsMembers) {
  for (const std::string name : {"graph_module", "range_constraints", "torch_version"}) {
    EXPECT_EQ(refusal("tiny", [&](Json& program) { program.erase(name); }), "'" + name + "' is missing");
  }
  for (const std::string name : {"inputs", "outputs", "nodes", "tensor_values"}) {
    EXPECT_EQ(refusal("tiny", [&](Json& program) { graph_of(program).erase(name); }), "'" + name + "' is missing");
    EXPECT_THAT(refusal("tiny", [&](Json& program) { graph_of(program)[name] = 5; }),
                ::testing::MatchesRegex("'" + name + "' is no (array|object)"));
  }
  for (const std::string name : {"inputs", "outputs", "metadata"}) {
    EXPECT_EQ(refusal("tiny", [&](Json& program) { node_of(program, "tanh").erase(name); }),
              "node 'tanh' ('torch.ops.aten.tanh.default'): '" + name + "' is missing");
  }
  EXPECT_EQ(refusal("tiny", [](Json& program) { graph_of(program)["nodes"][1] = 5; }), "'target' is missing");
  EXPECT_EQ(refusal("tiny", [](Json& program) { graph_of(program)["tensor_values"].erase("x"); }), "'x' is missing");
}

TEST(Graph, RefusesValuesThatAreDefinedTwiceOrNotYet) {
  const std::string node = "node 'tanh' ('torch.ops.aten.tanh.default'): ";
  EXPECT_EQ(refusal("tiny", [](Json& p) { node_of(p, "tanh")["outputs"][0]["as_tensor"]["name"] = "linear"; }),
            node + "value 'linear' is defined twice");
  EXPECT_EQ(refusal("tiny", [](Json& p) { argument_of(p, "tanh", "self")["as_tensor"]["name"] = "linear_1"; }),
            node + "value 'linear_1' is used before it is defined");
  EXPECT_EQ(refusal("tiny", [](Json& p) { argument_of(p, "tanh", "self")["as_tensor"]["name"] = "tanh"; }),
            node + "value 'tanh' is used before it is defined");  // a cycle
  EXPECT_EQ(refusal("tiny", [](Json& p) { graph_of(p)["outputs"][0]["as_tensor"]["name"] = "nowhere"; }),
            "value 'nowhere' is used before it is defined");
  EXPECT_EQ(refusal("tiny", [](Json& p) { graph_of(p)["inputs"][1] = graph_of(p)["inputs"][0]; }),
            "value 'p_hidden_weight' is defined twice");
  EXPECT_THAT(refusal("control",  // a branch sees its operands alone
                      [](Json& p) {
                        Json& branch = node_of(p, "cond")["inputs"][1]["arg"]["as_graph"]["graph"];
                        branch["outputs"][0]["as_tensor"]["name"] = "x";
                      }),
              HasSubstr("node 'cond' ('torch.ops.higher_order.cond'): value 'x' is used before it is defined"));
}

TEST(Graph, RefusesNamesThatAreThereTwice) {
  const auto rename = [](size_t index, const std::string& kind, const std::string& name) {
    return [=](Json& program) {
      signature_of(program)["input_specs"][index] = {{kind, {{"arg", {{"name", "a"}}}, {kind + "_name", name}}}};
      if (kind == "buffer") signature_of(program)["input_specs"][index][kind]["persistent"] = true;
    };
  };
  EXPECT_EQ(refusal("tiny", rename(1, "parameter", "hidden.weight")), "two inputs are called 'hidden.weight'");
  EXPECT_EQ(refusal("tiny", rename(1, "buffer", "hidden.weight")), "two inputs are called 'hidden.weight'");
  const auto twice = [](Json& program) {
    Json& signature = program["graph_module"]["module_call_graph"][0]["signature"];
    std::string names = signature["in_spec"];
    names.replace(names.find("right"), 5, "left");
    signature["in_spec"] = names;
  };
  EXPECT_EQ(refusal("sizes", twice), "two inputs are called 'left'");
  const auto twice_outside = [](Json& program) {
    Json& signature = program["graph_module"]["module_call_graph"][0]["signature"];
    std::string names = signature["out_spec"];
    names.replace(names.find("logits"), 6, "features");
    signature["out_spec"] = names;
  };
  EXPECT_EQ(refusal("mlp", twice_outside), "two outputs are called 'features'");
}

TEST(Graph, RefusesGraphsInEachOtherThatAreTooDeep) {
  const auto nested = [](int depth) {
    return [depth](Json& program) {
      Json& graph = graph_of(program);
      const Json innermost = {{"inputs", Json::array()}, {"outputs", Json::array()}, {"nodes", Json::array()}};
      Json inner = innermost;
      for (int i = 1; i < depth; ++i) {
        Json next = innermost;
        next["nodes"].push_back(node_of(program, "tanh"));
        next["nodes"][0]["inputs"] = {{{"name", ""}, {"arg", {{"as_graph", {{"graph", inner}}}}}}};
        inner = next;
      }
      graph["nodes"][1]["inputs"][0]["arg"] = {{"as_graph", {{"graph", inner}}}};
    };
  };
  EXPECT_NO_THROW(read(ArchiveFile("tiny").change_program(nested(16))));
  EXPECT_THAT(refusal("tiny", nested(17)), HasSubstr("graphs lie in each other more than 16 deep"));
  EXPECT_THAT(refusal("tiny", nested(50)), HasSubstr("nested more than 128 deep"));
}

TEST(Graph, RefusesPathsOfModulesThatLibtorchCannotHave) {
  const auto in_module = [](const std::string& path) {
    return [path](Json& p) { node_of(p, "tanh")["metadata"]["nn_module_stack"] = "key," + path + ",Type"; };
  };
  const std::string node = "node 'tanh' ('torch.ops.aten.tanh.default'): ";
  for (const std::string path : {".a", "a.", "a..b"}) {
    EXPECT_EQ(refusal("tiny", in_module(path)), node + "'" + path + "' is no path of modules: a part is empty");
  }
  std::string deep = "a";
  for (int i = 0; i < 64; ++i) deep += ".a";
  EXPECT_THAT(refusal("tiny", in_module(deep)), HasSubstr("is a module more than 64 deep"));
  EXPECT_NO_THROW(read(ArchiveFile("tiny").change_program(in_module(deep.substr(2)))));
  EXPECT_EQ(refusal("tiny", [](Json& p) { node_of(p, "tanh")["metadata"]["nn_module_stack"] = "a,b"; }),
            node + "'a,b' is no call of a module");
  EXPECT_THAT(
      refusal("tiny", [&](Json& p) { signature_of(p)["input_specs"][0]["parameter"]["parameter_name"] = deep; }),
      HasSubstr("is a module more than 64 deep"));
}

TEST(Graph, RefusesKindsThatItDoesNotSupport) {
  const auto with = [](const Json& argument) {
    return [argument](Json& p) { argument_of(p, "tanh", "self") = argument; };
  };
  const std::string node = "node 'tanh' ('torch.ops.aten.tanh.default'): ";
  EXPECT_EQ(refusal("tiny", with({{"as_custom_obj", {{"name", "a"}}}})),
            node + "arguments of kind 'as_custom_obj' are not supported");
  EXPECT_EQ(refusal("tiny", with({{"as_scalar_type", 99}})), node + "data type 99 is unknown");
  EXPECT_EQ(refusal("tiny", with({{"as_memory_format", 9}})), node + "memory format 9 is unknown");
  EXPECT_EQ(refusal("tiny", with({{"as_layout", 1}})),
            node + "layout 1 is not supported; only strided tensors (7) are");
  EXPECT_EQ(refusal("tiny", with({{"as_device", {{"type", "abacus"}, {"index", nullptr}}}})),
            node + "device 'abacus' is unknown");
  EXPECT_EQ(refusal("tiny", with({{"as_int", 1.5}})), node + "'1.5' is no whole number of 64 bits");
  EXPECT_EQ(refusal("tiny", with({{"as_int", 9223372036854775808u}})),
            node + "'9223372036854775808' is no whole number of 64 bits");
  EXPECT_EQ(refusal("tiny", with({{"as_float", "much"}})), node + "'\"much\"' is no number");
  EXPECT_EQ(refusal("tiny", with({{"as_bool", 1}})), node + "'1' is neither true nor false");
  EXPECT_EQ(refusal("tiny", with({{"as_ints", 1}})), node + "'1' is no array");
  EXPECT_EQ(refusal("tiny", with({{"as_int", 1}, {"as_bool", true}})),
            node + "'{\"as_bool\":true,\"as_int\":1}' has not one member");
  EXPECT_EQ(refusal("tiny", [](Json& p) { node_of(p, "tanh")["outputs"][0] = {{"as_custom_obj", 1}}; }),
            node + "results of kind 'as_custom_obj' are not supported");
  EXPECT_EQ(refusal("tiny", [](Json& p) { signature_of(p)["input_specs"][0] = {{"token", 1}}; }),
            "inputs of kind 'token' are not supported");
  EXPECT_EQ(refusal("tiny", [](Json& p) { signature_of(p)["output_specs"][0] = {{"loss_output", 1}}; }),
            "outputs of kind 'loss_output' are not supported");
}

TEST(Graph, RefusesASignatureThatDoesNotFit) {
  EXPECT_EQ(refusal("tiny", [](Json& p) { signature_of(p)["input_specs"].erase(0); }),
            "the signature has other inputs than the graph");
  EXPECT_EQ(refusal("tiny", [](Json& p) { signature_of(p)["output_specs"].clear(); }),
            "the signature has other outputs than the graph");
  EXPECT_EQ(refusal("tiny",
                    [](Json& p) {
                      graph_of(p)["inputs"].push_back({{"as_int", 3}}),
                          signature_of(p)["input_specs"].push_back(signature_of(p)["input_specs"][0]);
                    }),
            "input 'hidden.weight' of the graph is no value");
  EXPECT_EQ(refusal("tiny",
                    [](Json& p) {
                      signature_of(p)["output_specs"][0] = {{"buffer_mutation", {{"buffer_name", "hidden.weight"}}}};
                    }),
            "a result goes to buffer 'hidden.weight', which is no input");
  EXPECT_THAT(
      refusal("tiny", [](Json& p) { p["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = "[1, {"; }),
      ::testing::StartsWith("in_spec: "));
  EXPECT_EQ(refusal("tiny", [](Json& p) { p["range_constraints"]["s77"] = 3; }), "'min_val' is missing");
}

}  // namespace
}  // namespace fulgur::program
