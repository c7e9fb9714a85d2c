#include "fulgur/programs/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/linear.h>
#include <torch/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "tests/programs/archive_file.h"
#include "tests/testing/counting_allocator.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

// The models are those of archives/make.py. The tests in Python train larger ones, and compare with Python.
namespace fulgur {
namespace {

using Json = nlohmann::json;
using testing::archive_path;
using testing::ArchiveFile;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

nn::Program load(const std::string& name, const nn::ProgramOptions& options = {}) {
  return nn::Program(archive_path(name), options);
}

Batch mlp_batch(int64_t size = 6) {
  torch::manual_seed(1);
  return {{"x", torch::randn({size, 4})}, {"scale", torch::full({1}, 2.0F)}};
}

std::vector<std::string> names_of(const auto& items) {
  std::vector<std::string> names;
  for (const auto& item : items) names.push_back(item.key());
  return names;
}

std::vector<std::string> names_of(const Batch& batch) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : batch) names.push_back(name);
  return names;
}

std::map<std::string, at::Tensor> gradients_of(nn::Program net) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : net->named_parameters()) gradients[item.key()] = item.value().grad();
  return gradients;
}

TEST(Program, HasPythonsNames) {
  nn::Program net = load("mlp");
  EXPECT_THAT(names_of(net->named_parameters()),
              ::testing::UnorderedElementsAre("encode.weight", "encode.bias", "block.0.weight", "block.0.bias",
                                              "frozen.0.weight", "frozen.0.bias", "decode.weight", "decode.bias"));
  EXPECT_THAT(
      names_of(net->named_buffers()),
      ::testing::UnorderedElementsAre("block.0.running_mean", "block.0.running_var", "block.0.num_batches_tracked",
                                      "frozen.0.running_mean", "frozen.0.running_var", "frozen.0.num_batches_tracked"));
  EXPECT_THAT(net->input_names(), ElementsAre("x", "scale"));
  EXPECT_THAT(net->output_names(), ElementsAre("features", "logits"));
  EXPECT_THAT(load("tiny")->output_names(), ElementsAre("output"));
}

TEST(Program, TiedWeightsAreOneTensor) {
  nn::Program net = load("mlp");
  const auto parameters = net->named_parameters();
  EXPECT_TRUE(parameters["encode.weight"].is_same(parameters["decode.weight"]));
  EXPECT_FALSE(parameters["encode.bias"].is_same(parameters["decode.bias"]));
}

TEST(Program, AParameterNeedsAGradientIfItDidInPython) {
  for (const auto& item : load("mlp")->named_parameters()) {
    EXPECT_EQ(item.value().requires_grad(), item.key() != "decode.bias") << item.key();
  }
}

TEST(Program, ComputesWhatTheModelDoes) {
  nn::Program net = load("mlp");
  net->eval();
  const auto p = net->named_parameters();
  const Batch batch = mlp_batch();
  // Running means of 0 and variances of 1, as they are before training.
  at::Tensor x = torch::linear(batch["x"], p["encode.weight"], p["encode.bias"]) / std::sqrt(1 + 1e-5);
  x = torch::relu(x) / std::sqrt(1 + 1e-5);
  const Batch outputs = net->forward(batch);
  EXPECT_THAT(names_of(outputs), ElementsAre("features", "logits"));
  EXPECT_TRUE(outputs["features"].allclose(x, 1e-5, 1e-6));
  EXPECT_TRUE(outputs["logits"].allclose(torch::linear(x, p["encode.weight"], p["decode.bias"]) * 2, 1e-5, 1e-6));
}

TEST(Program, TrainAndEvalTurnDropoutOver) {
  nn::Program net = load("mlp");
  const auto draws = [&] {
    const Batch batch = mlp_batch();
    return !net->forward(batch)["logits"].equal(net->forward(batch)["logits"]);
  };
  EXPECT_TRUE(draws());
  net->eval();
  EXPECT_FALSE(draws());
  net->train();
  EXPECT_TRUE(draws());
  for (const auto& item : net->named_modules("", /*include_self=*/false)) item.value()->eval();
  EXPECT_FALSE(draws());  // the module that the operator belongs to decides, not the root
}

TEST(Program, TrainAndEvalTurnBatchNormOver) {
  nn::Program net = load("mlp");
  const auto buffers = net->named_buffers();
  const at::Tensor mean = buffers["block.0.running_mean"], counter = buffers["block.0.num_batches_tracked"];
  net->forward(mlp_batch());
  EXPECT_EQ(counter.item<int64_t>(), 1);
  const at::Tensor after = mean.clone();
  EXPECT_FALSE(after.equal(torch::zeros({4})));
  net->eval();
  net->forward(mlp_batch());
  EXPECT_EQ(counter.item<int64_t>(), 1);
  EXPECT_TRUE(mean.equal(after));
  net->train();
  net->forward(mlp_batch());
  net->forward(mlp_batch());
  EXPECT_EQ(counter.item<int64_t>(), 3);
  EXPECT_FALSE(mean.equal(after));
}

TEST(Program, WhatWasInEvalModeAtExportStaysThereUntilTrainIsCalled) {
  nn::Program net = load("mlp");
  const at::Tensor counter = net->named_buffers()["frozen.0.num_batches_tracked"];
  const auto modules = net->named_modules("", /*include_self=*/false);
  EXPECT_TRUE(modules["block.0"]->is_training());
  EXPECT_TRUE(modules["block.2"]->is_training());
  EXPECT_FALSE(modules["frozen.0"]->is_training());
  EXPECT_FALSE(modules["frozen.1"]->is_training());
  net->forward(mlp_batch());
  EXPECT_TRUE(net->named_buffers()["frozen.0.running_mean"].equal(torch::zeros({4})));
  EXPECT_EQ(counter.item<int64_t>(), 0);
  net->train();
  net->forward(mlp_batch());
  EXPECT_FALSE(net->named_buffers()["frozen.0.running_mean"].equal(torch::zeros({4})));
}

TEST(Program, AnExportOfEvalModeTrainsButForTheDropoutOfAttention) {
  nn::Program net = load("attention");
  const Batch batch{{"tokens", torch::arange(15).remainder(8).view({3, 5})}};
  const auto draws = [&] { return !net->forward(batch)["output"].equal(net->forward(batch)["output"]); };
  EXPECT_TRUE(draws());
  net->named_modules("", /*include_self=*/false)["dropout"]->eval();
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(draws());
}

TEST(Program, CausalAttentionSeesNothingOfLaterTokens) {
  nn::Program net = load("attention");
  net->eval();
  const at::Tensor tokens = torch::arange(15).remainder(8).view({3, 5}), other = tokens.clone();
  other.select(1, 4).fill_(0);
  const at::Tensor first = net->forward(tokens), second = net->forward(other);
  EXPECT_TRUE(first.slice(1, 0, 4).allclose(second.slice(1, 0, 4)));
  EXPECT_FALSE(first.select(1, 4).allclose(second.select(1, 4)));
}

TEST(Program, BranchesAndModesAreThoseOfPython) {
  nn::Program net = load("control");
  const auto p = net->named_parameters();
  for (const double sign : {1.0, -1.0}) {
    net->zero_grad();
    const at::Tensor x = torch::full({3, 4}, sign);
    const at::Tensor mean = torch::linear(x, p["first.weight"], p["first.bias"]).mean(0).detach();
    const auto half = [](const at::Tensor& tensor) { return tensor.to(torch::kBFloat16); };
    const at::Tensor product = torch::linear(half(x), half(p["second.weight"]), half(p["second.bias"])).to(at::kFloat);
    const at::Tensor given = product - mean;
    const at::Tensor expected = sign > 0 ? torch::linear(given, p["first.weight"], p["first.bias"]) : given * 2;
    const at::Tensor output = net->forward(x);
    EXPECT_TRUE(output.equal(expected)) << sign;
    output.sum().backward();
    // The branch that is not taken gives its operands a gradient of zeros.
    EXPECT_EQ(p["first.weight"].grad().abs().sum().item<float>() > 0, sign > 0);
    EXPECT_GT(p["second.weight"].grad().abs().sum().item<float>(), 0);
  }
}

TEST(Program, ComputesWithSizes) {
  nn::Program net = load("sizes");
  for (const int64_t rows : {4, 6, 7, 32}) {
    const int64_t columns = rows % 8;
    const at::Tensor left = torch::ones({rows, 3}), right = torch::ones({rows, columns});
    const Batch outputs = net->forward(Batch{{"left", left}, {"right", right}});
    EXPECT_THAT(names_of(outputs), ElementsAre("0", "1.0", "1.1", "2"));
    const double expected = 3.0 * static_cast<double>(rows * (rows / 3 - rows % 4)) +
                            static_cast<double>(rows * columns) * static_cast<double>(rows) / 2;
    EXPECT_DOUBLE_EQ(outputs["0"].item<double>(), expected) << rows;
    EXPECT_TRUE(outputs["1.0"].equal(torch::arange(rows * columns + 1) + 15.0F)) << rows;
    EXPECT_TRUE(outputs["1.1"].equal(left + torch::tensor({1.0F, 2.0F, 3.0F}))) << rows;
    EXPECT_TRUE(outputs["2"].equal(torch::tensor(7 - rows * columns))) << rows;
  }
}

TEST(Program, IgnoresOtherTensorsOfTheBatch) {
  nn::Program net = load("mlp");
  net->eval();
  const Batch batch = mlp_batch();
  EXPECT_TRUE(net->forward(batch.with("label", torch::ones({6})))["logits"].equal(net->forward(batch)["logits"]));
}

TEST(Program, RunsInThePrecisionOfItsParameters) {
  nn::Program net = load("mlp");
  net->eval();
  const Batch batch = mlp_batch();
  const at::Tensor expected = net->forward(batch)["logits"];
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble, at::kFloat}) {
    net->to(dtype);
    const at::Tensor found =
        net->forward(Batch{{"x", batch["x"].to(dtype)}, {"scale", batch["scale"].to(dtype)}})["logits"];
    EXPECT_EQ(found.scalar_type(), dtype);
    EXPECT_TRUE(found.to(at::kFloat).allclose(expected, 0.05, 0.05));
  }
  net->to(at::kBFloat16);
  net->train();
  const Batch half{{"x", batch["x"].to(at::kBFloat16)}, {"scale", batch["scale"].to(at::kBFloat16)}};
  net->forward(half)["logits"].sum().backward();
  EXPECT_EQ(net->named_parameters()["encode.weight"].grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(net->named_buffers()["block.0.num_batches_tracked"].scalar_type(), at::kLong);
}

TEST(Program, ABufferThatIsNotSavedKeepsItsValueInAnotherPrecision) {
  nn::Program stays = load("history"), moves = load("history");
  const at::Tensor x = torch::full({3, 4}, 2.0F);
  stays->forward(x);
  moves->forward(x);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    moves->to(dtype);
    EXPECT_TRUE(moves->forward(x.to(dtype)).to(at::kFloat).allclose(stays->forward(x))) << dtype;
  }
}

TEST(Program, WritesAnArchiveWithItsValues) {
  const testing::TempDir folder;
  nn::Program net = load("mlp");
  {
    const torch::NoGradGuard no_gradient;
    for (const at::Tensor& parameter : net->parameters()) parameter.add_(0.5);
  }
  net->forward(mlp_batch());  // changes buffers
  net->export_program(folder.path() / "new.pt2");
  nn::Program again(folder.path() / "new.pt2");
  EXPECT_TRUE(again->named_parameters()["encode.weight"].is_same(again->named_parameters()["decode.weight"]));
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(again->named_parameters()[item.key()].equal(item.value())) << item.key();
    EXPECT_EQ(again->named_parameters()[item.key()].requires_grad(), item.value().requires_grad()) << item.key();
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(again->named_buffers()[item.key()].equal(item.value())) << item.key();
  }
  net->eval();
  again->eval();
  EXPECT_TRUE(again->forward(mlp_batch())["logits"].equal(net->forward(mlp_batch())["logits"]));
  net->to(at::kBFloat16);  // the archive keeps its precision
  net->export_program(folder.path() / "rounded.pt2");
  EXPECT_EQ(nn::Program(folder.path() / "rounded.pt2")->named_parameters()["encode.bias"].scalar_type(), at::kFloat);
}

TEST(Program, ActivationsThatAreComputedAgainChangeNoGradientAndTakeLessMemory) {
  const auto run = [](const std::string& checkpoint, int64_t size, std::map<std::string, at::Tensor>& gradients) {
    nn::Program net = load("mlp", {.checkpoint = checkpoint});
    const Batch batch = mlp_batch(size);
    torch::manual_seed(5);
    const testing::CountingAllocator allocator;
    const int64_t before = allocator.live();
    const Batch outputs = net->forward(batch);
    const int64_t kept_bytes = allocator.live() - before;
    outputs["logits"].square().sum().backward();
    gradients = gradients_of(net);
    return kept_bytes;
  };
  std::map<std::string, at::Tensor> expected, found;
  // A region keeps the state of the random numbers, too: what counts is the growth with the batch.
  const int64_t all = -run("", 2, expected) + run("", 64, expected);
  const int64_t fewer = -run("block", 2, found) + run("block", 64, found);
  for (const auto& [name, gradient] : expected) {
    EXPECT_EQ(gradient.defined(), name != "decode.bias") << name;
    EXPECT_TRUE(!gradient.defined() || found.at(name).equal(gradient)) << name;
  }
  const auto activation_bytes = (64 - 2) * 4 * static_cast<int64_t>(sizeof(float));
  EXPECT_LE(fewer, all - activation_bytes);
}

TEST(Program, ANoneAmongTheInputsOfARegionThatIsComputedAgain) {
  const testing::TempDir folder;
  ArchiveFile file("control");  // the branch has no result, which goes into a region
  file.change_program([](Json& program) {
    for (const size_t branch : {1, 2}) {
      Json& graph = testing::node_of(program, "cond")["inputs"][branch]["arg"]["as_graph"]["graph"];
      graph["outputs"][0] = {{"as_none", true}};
    }
    Json node = testing::node_of(program, "sub");
    node["name"] = "last";
    node["target"] = "torch.ops.aten.clamp.Tensor";
    node["metadata"]["nn_module_stack"] = "key,region,Type";
    node["outputs"] = {{{"as_tensor", {{"name", "last"}}}}};
    node["inputs"] = {{{"name", "self"}, {"arg", {{"as_tensor", {{"name", "sub"}}}}}},
                      {{"name", "min"}, {"arg", {{"as_tensor", {{"name", "x"}}}}}},
                      {{"name", "max"}, {"arg", {{"as_tensor", {{"name", "getitem_2"}}}}}}};
    program["graph_module"]["graph"]["nodes"].push_back(node);
    program["graph_module"]["graph"]["outputs"][0]["as_tensor"]["name"] = "last";
  });
  nn::Program net(file.write(folder.path() / "none.pt2"), {.checkpoint = "region"});
  const at::Tensor output = net->forward(torch::ones({3, 4}));
  output.sum().backward();
  EXPECT_TRUE(net->named_parameters()["second.weight"].grad().defined());
}

TEST(Program, SizesOfAnInputThatOnlyTheLossNeedsAreReadElsewhere) {
  nn::Program net = load("batch_size");
  const at::Tensor x = torch::randn({5, 4});
  const Batch with = net->forward({{"x", x}, {"target", torch::randn({5, 4})}}), without = net->forward({{"x", x}});
  EXPECT_THAT(names_of(with), ElementsAre("loss", "logits"));
  EXPECT_THAT(names_of(without), ElementsAre("logits"));
  EXPECT_TRUE(without["logits"].equal(with["logits"]));
}

// ---- Inputs that do not fit ----

std::string refusal(nn::Program net, const Batch& batch) {
  const std::string message = testing::message_of<c10::ValueError>([&] { net->forward(batch); });
  return message.substr(0, message.find('\n'));
}

TEST(Program, RefusesABatchWithoutAnInput) {
  const std::string file = archive_path("mlp").string();
  EXPECT_EQ(refusal(load("mlp"), {{"x", torch::ones({3, 4})}, {"scales", torch::ones({1})}}),
            file +
                " needs the inputs x, scale: unknown tensor of the batch 'scale'; did you mean 'scales'? known: x, "
                "scales");
  const std::string message = testing::message_of<c10::ValueError>([] { load("mlp")->forward(torch::ones({3, 4})); });
  EXPECT_THAT(message, StartsWith(file + " has the inputs x, scale and the outputs features, logits: call forward() "
                                         "with a Batch"));
}

TEST(Program, AnInputThatIsWrittenToAViewOfWhatAnOutputReadsIsNeeded) {
  nn::Program net = load("teacher");
  const at::Tensor x = torch::ones({3, 4});
  EXPECT_THAT(refusal(net, {{"x", x}}), HasSubstr(" needs the inputs x, target: unknown tensor of the batch 'target'"));
  EXPECT_THAT(names_of(net->forward({{"x", x}, {"target", x}})), ElementsAre("loss", "logits"));
}

TEST(Program, RefusesAnInputOfAnotherTypeOrNumberOfDimensions) {
  const std::string file = archive_path("mlp").string();
  const at::Tensor scale = torch::ones({1});
  EXPECT_EQ(refusal(load("mlp"), {{"x", torch::ones({3, 4}, torch::kLong)}, {"scale", scale}}),
            "input 'x' of " + file + " is Long, but the program was exported for Float; convert it by to()");
  EXPECT_EQ(refusal(load("attention"), {{"tokens", torch::ones({3, 5})}}),
            "input 'tokens' of " + archive_path("attention").string() +
                " is Float, but the program was exported for Long; convert it by to()");
  EXPECT_EQ(refusal(load("mlp"), {{"x", torch::ones({4})}, {"scale", scale}}),
            "input 'x' of " + file + " has sizes [4], but the program was exported for 2 dimensions");
}

TEST(Program, RefusesSizesThatTheProgramWasNotExportedFor) {
  const std::string mlp = archive_path("mlp").string(), sizes = archive_path("sizes").string();
  EXPECT_EQ(refusal(load("mlp"), {{"x", torch::ones({65, 4})}, {"scale", torch::ones({1})}}),
            "dimension 0 of 'x' of " + mlp +
                " is 65, but the program was exported for 2 to 64; export it with another "
                "range of torch.export.Dim");
  EXPECT_EQ(refusal(load("mlp"), {{"x", torch::ones({3, 5})}, {"scale", torch::ones({1})}}),
            "dimension 1 of 'x' of " + mlp +
                " is 5, but the program was exported for 4 alone; export it with "
                "dynamic_shapes and torch.export.Dim to allow others");
  EXPECT_EQ(refusal(load("sizes"), {{"left", torch::ones({3, 3})}, {"right", torch::ones({3, 5})}}),
            "dimension 0 of 'left' of " + sizes +
                " is 3, but the program was exported for 4 to 32; export it with "
                "another range of torch.export.Dim");
  EXPECT_EQ(refusal(load("sizes"), {{"left", torch::ones({6, 3})}, {"right", torch::ones({7, 5})}}),
            "dimension 0 of 'right' of " + sizes + " is 7, but it must be 6 to go with dimension 0 of 'left'");
  load("sizes")->forward({{"left", torch::ones({4, 3})}, {"right", torch::ones({4, 0})}});  // as Python lets it pass
}

TEST(Program, ChecksASizeThatIsAMultipleOfAnother) {
  const testing::TempDir folder;
  ArchiveFile file("sizes");
  file.change_program([](Json& program) {
    Json& values = program["graph_module"]["graph"]["tensor_values"];
    const std::string symbol = values["left"]["sizes"][0]["as_expr"]["expr_str"];
    values["right"]["sizes"][0]["as_expr"]["expr_str"] = "Add(Mul(Integer(2), " + symbol + "), Integer(3))";
    program["guards_code"] = Json::array();
  });
  nn::Program net(file.write(folder.path() / "sizes.pt2"));
  const std::string name = (folder.path() / "sizes.pt2").string();
  const auto of = [](int64_t left, int64_t right) {
    return Batch{{"left", torch::ones({left, 3})}, {"right", torch::ones({right, 5})}};
  };
  net->forward(of(4, 11));
  EXPECT_THAT(refusal(net, of(4, 12)),
              StartsWith("dimension 0 of 'right' of " + name + " is 12, but the program was exported for 2 * s"));
  EXPECT_THAT(refusal(net, of(4, 1)),
              StartsWith("dimension 0 of 'right' of " + name + " is 1, but the program was exported for 2 * s"));
  EXPECT_EQ(refusal(net, of(4, 13)),
            "dimension 0 of 'right' of " + name + " is 13, but it must be 11 to go with dimension 0 of 'left'");
}

TEST(Program, RefusesSizesThatPythonsGuardsRefuse) {
  const testing::TempDir folder;
  ArchiveFile file("batch_size");
  file.change_program([](Json& program) {
    program["guards_code"] = {"(L['x'].size()[0] % 4) == 0", "L['target'].size()[0]*L['x'].size()[1] <= 32",
                              "L['x'].stride()[0] == 4"};  // the last is not read
  });
  nn::Program net(file.write(folder.path() / "guards.pt2"));
  const auto batch = [](int64_t size) {
    return Batch{{"x", torch::ones({size, 4})}, {"target", torch::ones({size, 4})}};
  };
  const std::string start = (folder.path() / "guards.pt2").string() + " was exported for sizes with ";
  net->forward(batch(8));
  EXPECT_EQ(
      refusal(net, batch(7)),
      start + "(L['x'].size()[0] % 4) == 0, but dimension 0 of 'x' is 7; export it with an example of such sizes");
  EXPECT_EQ(refusal(net, batch(12)),
            start +
                "L['target'].size()[0]*L['x'].size()[1] <= 32, but dimension 0 of 'target' is 12, dimension 1 of 'x' "
                "is 4; export it with an example of such sizes");
  net->forward({{"x", torch::ones({12, 4})}});  // nothing is said about 'target'
}

TEST(Program, RefusesAnotherNumberThanWasFixedAtExport) {
  const testing::TempDir folder;
  ArchiveFile file("tiny");
  file.change_program([](Json& program) {
    program["graph_module"]["graph"]["inputs"].push_back({{"as_float", 0.1}});
    program["graph_module"]["signature"]["input_specs"].push_back(
        {{"constant_input", {{"name", "scale"}, {"value", {{"as_float", 0.1}}}}}});
  });
  nn::Program net(file.write(folder.path() / "fixed.pt2"));
  const auto with = [](const at::Tensor& scale) { return Batch{{"x", torch::ones({2, 4})}, {"scale", scale}}; };
  net->forward({{"x", torch::ones({2, 4})}});
  net->forward(with(torch::tensor(0.1F)));
  net->forward(with(torch::tensor({0.1}, torch::kDouble)));
  EXPECT_EQ(
      refusal(net, with(torch::tensor(2.0F))),
      "input 'scale' of " + (folder.path() / "fixed.pt2").string() +
          " is fixed: the program was exported for 0.1 alone; take it out of the batch, or export the program with "
          "it as a tensor");
}

TEST(Program, ChecksANumber) {
  const testing::TempDir folder;
  ArchiveFile file("tiny");
  file.change_program([](Json& program) {
    Json& graph = program["graph_module"]["graph"];
    graph["inputs"].push_back({{"as_sym_int", {{"as_name", "n"}}}});
    graph["sym_int_values"]["n"] = {{"as_expr", {{"expr_str", "Symbol('s86', integer=True)"}}}};
    program["range_constraints"]["s86"] = {{"min_val", 3}, {"max_val", 5}};
    program["graph_module"]["signature"]["input_specs"].push_back(
        {{"user_input", {{"arg", {{"as_sym_int", {{"as_name", "n"}}}}}}}});
    graph["outputs"].push_back({{"as_sym_int", {{"as_name", "n"}}}});
    program["graph_module"]["signature"]["output_specs"].push_back(
        {{"user_output", {{"arg", {{"as_sym_int", {{"as_name", "n"}}}}}}}});
  });
  nn::Program net(file.write(folder.path() / "number.pt2"));
  const std::string name = (folder.path() / "number.pt2").string();
  const auto with = [](const at::Tensor& n) { return Batch{{"x", torch::ones({2, 4})}, {"n", n}}; };
  EXPECT_EQ(net->forward(with(torch::tensor(4)))["1"].item<int64_t>(), 4);
  EXPECT_EQ(refusal(net, with(torch::tensor(6))), "'n' of " + name +
                                                      " is 6, but the program was exported for 3 to 5; "
                                                      "export it with another range of torch.export.Dim");
  EXPECT_EQ(refusal(net, with(torch::tensor(4.0))), "input 'n' of " + name +
                                                        " is Float of sizes [], but the program "
                                                        "was exported for a whole number");
  EXPECT_EQ(refusal(net, with(torch::ones({2}, torch::kLong))),
            "input 'n' of " + name + " is Long of sizes [2], but the program was exported for a whole number");
}

// ---- Archives that do not fit together ----

std::string refusal(const ArchiveFile& file) {
  const testing::TempDir folder;
  const auto path = folder.path() / "bad.pt2";
  const std::string message = testing::message_of<CheckpointError>([&] { nn::Program(file.write(path)); });
  EXPECT_THAT(message, StartsWith(path.string() + ": "));
  return message.substr(std::min(message.size(), path.string().size() + 2));
}

TEST(Program, RefusesAGradientForWholeNumbers) {
  EXPECT_THAT(refusal(ArchiveFile("tiny").change_weights(
                  [](Json& config) { config["hidden.bias"]["tensor_meta"]["dtype"] = 4; })),
              StartsWith("tensor 'hidden.bias' cannot be registered: "));
}

TEST(Program, RefusesAnUnknownOperatorWithItsPlace) {
  EXPECT_THAT(refusal(ArchiveFile("tiny").change_program([](Json& program) {
                testing::node_of(program, "linear_1")["target"] = "torch.ops.mine.linear.default";
              })),
              StartsWith("node 'linear_1' ('torch.ops.mine.linear.default') in module 'out': there is no operator "
                         "mine::linear; if it is a custom one, link or load the library that registers it"));
}

TEST(Program, ATextThatIsNoNameOfAModuleIsRefused) {
  EXPECT_THAT(refusal(ArchiveFile("tiny")
                          .change_program([](Json& program) {
                            program["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = "";
                          })
                          .change_weights([](Json& config) { config[""] = config["hidden.weight"]; })),
              StartsWith("tensor '' cannot be registered: "));
}

}  // namespace
}  // namespace fulgur
