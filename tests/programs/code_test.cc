#include "fulgur/programs/code.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/programs/exported_program.h"
#include "tests/programs/archive_file.h"
#include "tests/testing/errors.h"

namespace fulgur::program {
namespace {

using Json = nlohmann::json;
using c10::IValue;
using testing::ArchiveFile;
using testing::argument_of;
using ::testing::HasSubstr;
using testing::node_of;

Code compile(ArchiveFile file, const std::string& checkpoint = "") {
  const ExportedProgram program = parse_program(file.entries.at("models/model.json"), "file");
  return Code(program.graph, {.file = "file", .checkpoint = checkpoint}, {});
}

// Why an archive's program cannot be compiled after a change.
std::string refusal(const std::string& archive, const ArchiveFile::Change& change, const std::string& checkpoint = "") {
  ArchiveFile file(archive);
  file.change_program(change);
  const std::string message = testing::message_of<CheckpointError>([&] { compile(file, checkpoint); });
  EXPECT_THAT(message, ::testing::StartsWith("file: "));
  EXPECT_EQ(message.find("file: ", 1), message.npos) << message;  // the file is named once
  return message.substr(std::min<size_t>(message.size(), 6));
}

const std::vector<IValue> kInputs{at::ones({8, 4}), at::zeros({8}), at::ones({1, 8}), at::zeros({1}), at::ones({3, 4})};

// What an archive "tiny" says in run() after a change.
std::string failure(const ArchiveFile::Change& change) {
  ArchiveFile file("tiny");
  file.change_program(change);
  const Code code = compile(file);
  return testing::message_of<c10::Error>([&] { code.run(kInputs); });
}

TEST(Code, RefusesOperatorsThatThisProcessDoesNotHave) {
  const auto call = [](const std::string& target) {
    return refusal("tiny", [&](Json& program) { node_of(program, "linear")["target"] = target; });
  };
  EXPECT_EQ(call("torch.ops.aten.lineal.default"),
            "node 'linear' ('torch.ops.aten.lineal.default') in module 'hidden': there is no operator aten::lineal; if "
            "it is a custom one, link or load the library that registers it");
  EXPECT_EQ(call("torch.ops.aten.add.Tenser"),
            "node 'linear' ('torch.ops.aten.add.Tenser') in module 'hidden': there is no operator aten::add.Tenser; if "
            "it is a custom one, link or load the library that registers it");
  EXPECT_EQ(call("torch.ops.higher_order.while_loop"),
            "node 'linear' ('torch.ops.higher_order.while_loop') in module 'hidden': of the higher-order operators, "
            "cond, no_grad and autocast are supported");
  for (const std::string target : {"os.system", "torch.ops.aten", "torch.ops.aten.linear", "torch.ops..", ""}) {
    EXPECT_EQ(call(target),
              "node 'linear' ('" + target + "') in module 'hidden': this function of Python is not supported");
  }
}

TEST(Code, RefusesAnOperatorThatOpensFiles) {
  EXPECT_EQ(refusal("tiny",
                    [](Json& program) {
                      Json& node = node_of(program, "tanh");
                      node["target"] = "torch.ops.aten.from_file.default";
                      node["inputs"] = {{{"name", "filename"}, {"arg", {{"as_string", "/etc/passwd"}}}}};
                    }),
            "node 'tanh' ('torch.ops.aten.from_file.default'): a program must not open files");
}

TEST(Code, RefusesOperatorsThatMakeViewsWithoutACheck) {
  for (const std::string name : {"inductor._reinterpret_tensor.default", "aten._reshape_alias.default"}) {
    EXPECT_THAT(refusal("tiny", [&](Json& program) { node_of(program, "tanh")["target"] = "torch.ops." + name; }),
                HasSubstr("which makes views without a check of their bounds"));
  }
}

TEST(Code, RefusesArgumentsThatTheOperatorDoesNotHaveOrNeeds) {
  const std::string node = "node 'linear' ('torch.ops.aten.linear.default') in module 'hidden': ";
  const auto change = [](const auto& inputs) {
    return [inputs](Json& program) { inputs(node_of(program, "linear")["inputs"]); };
  };
  EXPECT_EQ(refusal("tiny", change([](Json& inputs) { inputs.erase(1); })), node + "argument 'weight' is missing");
  EXPECT_EQ(refusal("tiny", change([](Json& inputs) { inputs[1]["name"] = "weights"; })),
            node + "argument 'weight' is missing");
  EXPECT_EQ(refusal("tiny", change([](Json& inputs) { inputs[2]["name"] = "offset"; })),
            node + "the operator has no argument 'offset'");
  EXPECT_EQ(refusal("tiny", change([](Json& inputs) { inputs[2]["name"] = "weight"; })),
            node + "argument 'weight' is given twice");
}

TEST(Code, RefusesArgumentsOfTheWrongKind) {
  const auto give = [](const std::string& node, const std::string& argument, const Json& value) {
    const std::string message = refusal("attention", [&](Json& p) { argument_of(p, node, argument) = value; });
    return message.substr(std::min(message.size(), message.find("argument '")));
  };
  EXPECT_EQ(give("linear_1", "weight", {{"as_string", "w"}}),
            "argument 'weight': 'w' (String) is given where Tensor is needed");
  EXPECT_EQ(give("linear_1", "weight", {{"as_none", true}}), "argument 'weight': None is given where Tensor is needed");
  EXPECT_EQ(give("linear_1", "weight", {{"as_ints", {1, 2}}}),
            "argument 'weight': a list is given where Tensor is needed");
  EXPECT_EQ(give("linear_1", "bias", {{"as_scalar_type", 7}}),
            "argument 'bias': a data type is given where Tensor is needed");
  EXPECT_EQ(give("linear_1", "bias", {{"as_device", {{"type", "cpu"}, {"index", nullptr}}}}),
            "argument 'bias': a device is given where Tensor is needed");
  EXPECT_EQ(give("dropout", "p", {{"as_bool", true}}), "argument 'p': True (Bool) is given where float is needed");
  EXPECT_EQ(give("dropout", "train", {{"as_int", 1}}), "argument 'train': 1 (Int) is given where bool is needed");
  EXPECT_EQ(give("transpose", "dim0", {{"as_float", 1.5}}),
            "argument 'dim0': 1.5 (Double) is given where int is needed");
  EXPECT_EQ(give("permute", "dims", {{"as_int", 1}}), "argument 'dims': 1 (Int) is given where int[] is needed");
  EXPECT_EQ(give("permute", "dims", {{"as_strings", {"a"}}}),
            "argument 'dims': 'a' (String) is given where int is needed");
  EXPECT_EQ(give("permute", "dims", {{"as_sym_ints", {{{"as_float", 1.0}}}}}),
            "argument 'dims': 1. (Double) is given where int is needed");
  EXPECT_EQ(give("permute", "dims", {{"as_optional_tensors", {{{"as_ints", {1}}}}}}),
            "argument 'dims': a list is given where int is needed");
  EXPECT_EQ(give("permute", "self",
                 {{"as_graph",
                   {{"graph", {{"inputs", Json::array()}, {"nodes", Json::array()}, {"outputs", Json::array()}}}}}}),
            "argument 'self': a graph is given where a value is needed");
}

TEST(Code, RefusesNumbersInTheWayOfDataTypesAndLayouts) {
  const auto give = [](const Json& value, const std::string& name) {
    const std::string message = refusal("sizes", [&](Json& program) {
      node_of(program, "arange")["inputs"].push_back({{"name", name}, {"arg", value}});
    });
    return message.substr(std::min(message.size(), message.find("argument '")));
  };
  EXPECT_EQ(give({{"as_int", 1000}}, "dtype"), "argument 'dtype': 1000 (Int) is given where ScalarType is needed");
  EXPECT_EQ(give({{"as_int", 99}}, "layout"), "argument 'layout': 99 (Int) is given where Layout is needed");
  compile(ArchiveFile("sizes").change_program([](Json& program) {
    node_of(program, "arange")["inputs"].push_back({{"name", "layout"}, {"arg", {{"as_layout", 7}}}});
    node_of(program, "arange")["inputs"].push_back({{"name", "dtype"}, {"arg", {{"as_scalar_type", 5}}}});
  }));
}

TEST(Code, RefusesFunctionsOfSizesThatAreCalledOtherwise) {
  const std::string node = "node 'floordiv' ('_operator.floordiv'): ";
  EXPECT_EQ(refusal("sizes", [](Json& p) { node_of(p, "floordiv")["inputs"].erase(1); }),
            node + "the function has 2 arguments, but 1 are given");
  EXPECT_EQ(
      refusal("sizes", [](Json& p) { node_of(p, "floordiv")["inputs"].push_back(node_of(p, "mod")["inputs"][0]); }),
      node + "the function has 2 arguments, but 3 are given");
  EXPECT_EQ(refusal("sizes", [](Json& p) { argument_of(p, "floordiv", "b") = {{"as_string", "3"}}; }),
            node + "argument 'b' is no number");
  EXPECT_EQ(refusal("sizes", [](Json& p) { argument_of(p, "floordiv", "b") = {{"as_ints", {3}}}; }),
            node + "argument 'b' is no number");
}

TEST(Code, RefusesHigherOrderOperatorsThatAreCalledOtherwise) {
  const auto change = [](const std::string& node, const auto& inputs) {
    return refusal("control", [&](Json& program) { inputs(node_of(program, node)["inputs"]); });
  };
  const std::string cond = "node 'cond' ('torch.ops.higher_order.cond'): ",
                    no_grad = "node 'mean' ('torch.ops.higher_order.wrap_with_set_grad_enabled'): ",
                    autocast = "node 'linear_1' ('torch.ops.higher_order.wrap_with_autocast'): ";
  EXPECT_EQ(change("cond", [](Json& inputs) { inputs.erase(3); }), cond + "argument 3 is missing");
  EXPECT_EQ(change("cond", [](Json& inputs) { inputs[3] = inputs[0]; }), cond + "its operands are no list");
  EXPECT_EQ(change("cond", [](Json& inputs) { inputs[1] = inputs[0]; }), cond + "argument 1 is no graph");
  EXPECT_EQ(change("cond", [](Json& inputs) { inputs[3]["arg"]["as_tensors"].erase(0); }),
            cond + "its graph has another number of inputs");
  EXPECT_EQ(change("mean", [](Json& inputs) { inputs[0]["arg"] = {{"as_int", 0}}; }),
            no_grad + "argument 0 is neither true nor false");
  EXPECT_EQ(change("linear_1", [](Json& inputs) { inputs[1]["arg"] = {{"as_scalar_type", 5}}; }),
            autocast + "autocast to Long is not possible");
  EXPECT_EQ(
      change("cond", [](Json& inputs) { inputs[1]["arg"]["as_graph"]["graph"]["nodes"][0]["target"] = "os.system"; }),
      cond + "node 'linear' ('os.system'): this function of Python is not supported");
}

TEST(Code, NamesTheNodeAlsoWithinARegionThatIsComputedAgain) {
  const auto break_it = [](Json& program) { node_of(program, "linear")["target"] = "torch.ops.aten.lineal.default"; };
  EXPECT_THAT(refusal("tiny", break_it, "hidden"),
              HasSubstr("node 'linear' ('torch.ops.aten.lineal.default') in module 'hidden': there is no operator"));
}

TEST(Code, ANormFollowsTheModeOnlyIfItHasRunningStatistics) {
  const auto follows = [](const std::string& name, const Argument& mean) {
    const Node node{.name = "norm",
                    .target = "torch.ops.aten." + name,
                    .arguments = {{.name = "running_mean", .argument = mean}},
                    .outputs = {}};
    return follows_mode(node, "training");
  };
  for (const std::string name : {"batch_norm.default", "native_batch_norm.default", "_native_batch_norm_legit.default",
                                 "_native_batch_norm_legit_functional.default"}) {
    EXPECT_TRUE(follows(name, {ValueRef{0}})) << name;
    EXPECT_FALSE(follows(name, {})) << name;
  }
  const Node no_stats{.name = "norm",
                      .target = "torch.ops.aten._native_batch_norm_legit.no_stats",
                      .arguments = {{.name = "training", .argument = {IValue(true)}}},
                      .outputs = {}};
  EXPECT_FALSE(follows_mode(no_stats, "training"));
}

TEST(Code, RefusesResultsThatAreNoValues) {
  EXPECT_EQ(refusal("tiny", [](Json& p) { p["graph_module"]["graph"]["outputs"][0] = {{"as_strings", {"a"}}}; }),
            "the results of the graph: 'a' (String) is given where Tensor is needed");
}

TEST(Code, AnErrorInRunNamesTheNodeAndTheFile) {
  const std::string message =
      failure([](Json& p) { argument_of(p, "linear_1", "weight") = {{"as_tensor", {{"name", "x"}}}}; });
  EXPECT_THAT(message, HasSubstr("node 'linear_1' ('torch.ops.aten.linear.default') in module 'out' of file"));
}

TEST(Code, RefusesResultsInAnotherNumberThanTheGraphHas) {
  EXPECT_THAT(
      failure([](Json& p) { node_of(p, "linear")["outputs"].push_back({{"as_tensor", {{"name", "second"}}}}); }),
      HasSubstr("the operator has 1 results, but the graph 2"));
  EXPECT_THAT(failure([](Json& p) {
                Json& node = node_of(p, "linear");
                node["target"] = "torch.ops.aten.unbind.int";
                node["inputs"] = {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", "x"}}}}}}};
                node["outputs"] = {{{"as_tensors", {{{"name", "linear"}}, {{"name", "second"}}}}}};
              }),
              HasSubstr("the operator has a list of 3, but the graph one of 2"));
}

TEST(Code, RefusesValuesThatAnOperatorCannotTake) {
  const auto with_a_size = [](const auto& change) {
    return [=](Json& program) {
      Json& node = node_of(program, "linear");
      node["target"] = "torch.ops.aten.sym_size.int";
      node["inputs"] = {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", "x"}}}}}},
                        {{"name", "dim"}, {"arg", {{"as_int", 0}}}}};
      change(node_of(program, "tanh"));
    };
  };
  const auto as_size = [](Json& node) {  // a tensor for an int
    node["target"] = "torch.ops.aten.sum.dim_IntList";
    node["inputs"] = {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", "x"}}}}}},
                      {{"name", "dim"}, {"arg", {{"as_tensors", {{{"name", "x"}}}}}}}};
  };
  EXPECT_THAT(failure(with_a_size(as_size)), HasSubstr("node 'tanh' ('torch.ops.aten.sum.dim_IntList') of file"));
  const auto as_function = [](Json& node) {  // a tensor among sizes
    node["target"] = "_operator.add";
    node["inputs"] = {{{"name", "a"}, {"arg", {{"as_tensor", {{"name", "linear"}}}}}},
                      {{"name", "b"}, {"arg", {{"as_tensor", {{"name", "x"}}}}}}};
  };
  EXPECT_THAT(failure(with_a_size(as_function)), HasSubstr("the program computes a size from a Tensor"));
}

}  // namespace
}  // namespace fulgur::program
