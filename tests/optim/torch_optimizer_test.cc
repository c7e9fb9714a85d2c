#include "fulgur/optim/torch_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/state_json.h"
#include "fulgur/core/module.h"
#include "fulgur/data/data_loader.h"
#include "fulgur/data/tensor_dataset.h"
#include "fulgur/strategies/engine/saved_optimizers.h"
#include "fulgur/trainer/trainer.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

using optim::TorchOptimizer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TempDir;
using ::testing::TestParamInfo;
using ::testing::ThrowsMessage;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using OwnedByTorch = std::unique_ptr<torch::optim::Optimizer>;

// The second parameter lies column by column, unless `row_by_row`; the last one is in no loss, so it never has a
// gradient.
std::vector<at::Tensor> parameters(bool row_by_row = false) {
  at::Tensor matrix = torch::linspace(-2, 1, 6).view({2, 3}).t().detach();
  if (row_by_row) matrix = matrix.contiguous();
  return {torch::linspace(-1, 2, 5).requires_grad_(), matrix.requires_grad_(), torch::full({2}, 0.5).requires_grad_()};
}

at::Tensor loss_of(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) param.mutable_grad().reset();
  const at::Tensor loss = params[0].pow(4).sum() + (params[1] - 1).square().sum() + (params[0].sum() * params[1].sum());
  loss.backward();
  return loss;
}

template <class AnyOptimizer>
void take_steps(AnyOptimizer& optimizer, const std::vector<at::Tensor>& params, int count, bool needs_closure) {
  for (int i = 0; i < count; ++i) {
    if (needs_closure) {
      optimizer.step([&] { return loss_of(params); });
    } else {
      loss_of(params);
      optimizer.step();
    }
  }
}

struct Kind {
  const char* name;
  std::function<OwnedByTorch(const Groups&)> make;
  bool needs_closure = false;  // such an optimizer takes one group of parameters that lie row by row
};

OwnedByTorch make(const Kind& kind, const std::vector<at::Tensor>& params) {
  if (kind.needs_closure) return kind.make({Groups::value_type(params)});
  return kind.make({Groups::value_type(std::vector{params[0]}), Groups::value_type(std::vector{params[1], params[2]})});
}

// Writes a state to a checkpoint's files and reads it back.
State through_files(const State& state) {
  const TempDir dir;
  NamedTensors tensors;
  const std::string json = state_to_json(state, tensors);
  write_safetensors(dir.path() / "tensors", tensors);
  const SafetensorsFile file(dir.path() / "tensors");
  return state_from_json(json, "json", [&](const std::string& name) { return file.tensor(name); });
}

class EveryTorchOptimizer : public ::testing::TestWithParam<Kind> {};

TEST_P(EveryTorchOptimizer, GoesOnFromItsStateBitForBit) {
  const bool needs_closure = GetParam().needs_closure;
  const std::vector<at::Tensor> expected = parameters(needs_closure);
  const OwnedByTorch uninterrupted = make(GetParam(), expected);
  take_steps(*uninterrupted, expected, 7, needs_closure);

  for (const int steps_before : {0, 1, 4}) {
    const std::vector<at::Tensor> first = parameters(needs_closure), resumed = parameters(needs_closure);
    TorchOptimizer saved(make(GetParam(), first));
    take_steps(saved, first, steps_before, needs_closure);
    TorchOptimizer restored(make(GetParam(), resumed));
    take_steps(restored, resumed, 2, needs_closure);  // leaves a state that load_state() must replace
    restored.load_state(through_files(saved.state()));
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < first.size(); ++i) resumed[i].copy_(first[i]);
    }
    take_steps(restored, resumed, 7 - steps_before, needs_closure);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(resumed[i].equal(expected[i])) << steps_before;
  }
}

TEST_P(EveryTorchOptimizer, RefusesAStateThatDoesNotFit) {
  const std::vector<at::Tensor> params = parameters(GetParam().needs_closure);
  TorchOptimizer optimizer(make(GetParam(), params));
  take_steps(optimizer, params, 3, GetParam().needs_closure);
  const State good = through_files(optimizer.state());
  int num_tensors = 0;
  for (const auto& [name, value] : good.values()) {
    SCOPED_TRACE(name);
    State bad = good;
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      ++num_tensors;
      bad.set(name, torch::zeros({3, 7}));
      EXPECT_THAT(message_of<CheckpointError>([&] { optimizer.load_state(bad); }), HasSubstr("shape [3, 7]"));
      bad.set(name, tensor->to(at::kComplexFloat));
      EXPECT_THAT(message_of<CheckpointError>([&] { optimizer.load_state(bad); }), HasSubstr("dtype ComplexFloat"));
    }
    bad = good;
    bad.erase(name);
    const bool is_alone = good.child(name.substr(0, name.rfind('/'))).values().size() == 1;  // no state is left
    if (!is_alone) {
      EXPECT_THROW(optimizer.load_state(bad), CheckpointError);
    }
    if (std::holds_alternative<int64_t>(value)) {
      bad.set(name, int64_t{-1});
      EXPECT_THAT(message_of<CheckpointError>([&] { optimizer.load_state(bad); }), HasSubstr("is -1"));
    }
    bad.set(name, true);
    EXPECT_THROW(optimizer.load_state(bad), CheckpointError);
  }
  EXPECT_GE(num_tensors, 2);
}

INSTANTIATE_TEST_SUITE_P(
    , EveryTorchOptimizer,
    ::testing::Values(
        Kind{"Adam",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::Adam>(groups, torch::optim::AdamOptions(0.1).amsgrad(true));
             }},
        Kind{"AdamW",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.1).weight_decay(0.1));
             }},
        Kind{"SGD",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(1e-3).momentum(0.9));
             }},
        Kind{"RMSprop",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::RMSprop>(
                   groups, torch::optim::RMSpropOptions(1e-2).momentum(0.5).centered(true));
             }},
        Kind{"Adagrad",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::Adagrad>(groups, torch::optim::AdagradOptions(0.1).lr_decay(0.1));
             }},
        Kind{"LBFGS",
             [](const Groups& groups) -> OwnedByTorch {
               return std::make_unique<torch::optim::LBFGS>(
                   groups, torch::optim::LBFGSOptions(0.05).max_iter(3).history_size(4).tolerance_change(0));
             },
             true}),
    [](const TestParamInfo<Kind>& kind) { return kind.param.name; });

TEST(TorchOptimizer, SaysThatAStateIsOfAnotherClass) {
  const std::vector<at::Tensor> params = parameters();
  TorchOptimizer adam(torch::optim::Adam(params, 0.1)), sgd(torch::optim::SGD(params, 0.1));
  EXPECT_THAT(message_of<CheckpointError>([&] { sgd.load_state(adam.state()); }),
              AllOf(HasSubstr("the state of torch::optim::Adam"),
                    HasSubstr("configure_optimizers returns torch::optim::SGD now")));
}

TEST(TorchOptimizer, SaysOfAnOldCheckpointWhyItCannotBeRead) {
  torch::nn::Module module;
  const at::Tensor param = module.register_parameter("w", torch::zeros({2}));
  const Optimizers optimizers = TorchOptimizer(torch::optim::SGD(std::vector{param}, 0.1));
  State saved;
  save_optimizers(module, optimizers, saved);
  State old;
  for (const auto& [name, value] : saved.values()) old.set(name, value);
  for (const auto& [name, value] : saved.values()) {
    if (name.ends_with("/name")) old.set(name, std::string("TorchOptimizer"));
    if (name.ends_with("own/class")) old.set(name.substr(0, name.size() - 5) + "torch", torch::zeros({1}));
  }
  EXPECT_THAT([&] { load_optimizers(module, optimizers, old); },
              ThrowsMessage<CheckpointError>(HasSubstr("load the weights only")));
  EXPECT_THAT([&] { load_optimizers(module, optimizers, old); },
              ThrowsMessage<CheckpointError>(HasSubstr("an archive of TorchScript, which can run code")));
}

// An archive of TorchScript, as torch::optim writes and reads its states, may have code that runs when it is read.
TEST(TorchOptimizer, RunsNoCodeOfAState) {
  const TempDir dir;
  const std::filesystem::path trace = dir.path() / "was_here";
  torch::jit::Module evil("Evil");
  evil.define("def __getstate__(self) -> int:\n  return 0\n");
  evil.define("def __setstate__(self, state: int) -> None:\n  torch.save(state, '" + trace.string() + "')\n");
  std::ostringstream archive;
  evil.save(archive);
  const std::string bytes = archive.str();
  const at::Tensor tensor = torch::empty({static_cast<int64_t>(bytes.size())}, torch::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  std::istringstream unsafe(bytes);
  torch::jit::load(unsafe);
  ASSERT_TRUE(std::filesystem::remove(trace)) << "the archive has code that runs";

  State state;
  state.set("torch", tensor);
  TorchOptimizer optimizer(torch::optim::SGD(parameters(), 0.1));
  EXPECT_THAT([&] { optimizer.load_state(state); },
              ThrowsMessage<CheckpointError>(HasSubstr("an archive of TorchScript, which can run code")));
  EXPECT_FALSE(std::filesystem::exists(trace));
}

TEST(TorchOptimizer, LearningRateAndWeightDecayAreThoseOfTheGroups) {
  const std::vector<at::Tensor> ours = parameters(), theirs = parameters();
  TorchOptimizer optimizer(torch::optim::SGD(ours, torch::optim::SGDOptions(0.5).weight_decay(0.25)));
  EXPECT_EQ(optimizer.groups()[0].lr, 0.5);
  EXPECT_EQ(optimizer.groups()[0].weight_decay, 0.25);
  optimizer.groups()[0].lr = 1e-3;
  optimizer.groups()[0].weight_decay = 0.75;
  torch::optim::SGD oracle(theirs, torch::optim::SGDOptions(1e-3).weight_decay(0.75));
  take_steps(optimizer, ours, 1, false);
  take_steps(oracle, theirs, 1, false);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].equal(theirs[i]));
}

// A gradient of 2e-8 is zero in fp16, and 1.31e-3 at a loss scale of 65536.
TEST(TorchOptimizer, TheLossScaleIsTakenOffIn32Bits) {
  const at::Tensor weight = torch::zeros({1}, at::kHalf);
  weight.mutable_grad() = torch::full({1}, 1.31e-3, at::kHalf);
  TorchOptimizer optimizer(torch::optim::SGD({weight}, 100.0));
  optimizer.step({.factor = torch::tensor(1.0 / 65536, at::kDouble)});
  EXPECT_NEAR(weight.item<double>(), -2e-6, 1e-7);
}

// torch's SGD takes a sparse gradient; a norm of it is not computed.
TEST(TorchOptimizer, SparseGradientsTrainButAreNotClipped) {
  struct Words : Module {
    torch::nn::Embedding table =
        register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true)));
    at::Tensor training_step(const Batch& batch, int64_t) override { return table(batch["word"]).sum(); }
    Optimizers configure_optimizers() override {
      return TorchOptimizer(torch::optim::SGD(parameters(), torch::optim::SGDOptions(0.5)));
    }
  };
  const auto loader = [] {
    return DataLoader::make(TensorDataset::make({{"word", torch::tensor({1, 3})}}), {.batch_size = 2});
  };
  const auto options = [](double clip, const std::string& algorithm = "norm") {
    return testing::quiet({.strategy = "single_device",
                           .max_epochs = 1,
                           .gradient_clip_val = clip,
                           .gradient_clip_algorithm = algorithm});
  };
  const auto module = make_module<Words>();
  const at::Tensor before = module->table->weight.detach().clone();
  Trainer(options(0)).fit(module, {.train = loader()});
  at::Tensor expected = before.clone();
  for (const int64_t word : {1, 3}) expected[word] -= 0.5;
  EXPECT_TRUE(module->table->weight.equal(expected));
  for (const char* algorithm : {"norm", "value"}) {
    EXPECT_THAT(
        message_of<SetupError>(
            [&] { Trainer(options(1.0, algorithm)).fit(make_module<Words>(), {.train = loader()}); }),
        HasSubstr("a gradient is sparse, which is neither measured nor clipped; give the embedding that it comes from "
                  "sparse = false"));
  }
}

TEST(TorchOptimizer, KeepsTheNewestOfAHistoryThatIsShorterNow) {
  const auto lbfgs = [](const std::vector<at::Tensor>& params, int64_t history_size) {
    return TorchOptimizer(
        torch::optim::LBFGS(params, torch::optim::LBFGSOptions(0.05).max_iter(3).history_size(history_size)));
  };
  const std::vector<at::Tensor> params = parameters(/*row_by_row=*/true);
  TorchOptimizer longer = lbfgs(params, 4), shorter = lbfgs(params, 2);
  take_steps(longer, params, 4, true);
  const State saved = longer.state();
  shorter.load_state(saved);
  const State kept = shorter.state();
  for (const std::string name : {"0/0/old_dirs/", "0/0/old_stps/", "0/0/ro/"}) {
    EXPECT_TRUE(kept.get<at::Tensor>(name + "0").equal(saved.get<at::Tensor>(name + "2")));
    EXPECT_TRUE(kept.get<at::Tensor>(name + "1").equal(saved.get<at::Tensor>(name + "3")));
    EXPECT_EQ(kept.find<at::Tensor>(name + "2"), nullptr);
  }
  take_steps(shorter, params, 1, true);
}

TEST(TorchOptimizer, RefusesAClassWhoseStateItCannotKeep) {
  struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {};
  struct Own : torch::optim::Optimizer {
    using Optimizer::Optimizer;
    at::Tensor step(LossClosure) override { return {}; }
  };
  EXPECT_THAT(message_of<UsageError>(
                  [] { TorchOptimizer(std::make_unique<Own>(parameters(), std::make_unique<OwnOptions>())); }),
              HasSubstr("derive yours from fulgur::Optimizer"));
}

}  // namespace
}  // namespace fulgur
