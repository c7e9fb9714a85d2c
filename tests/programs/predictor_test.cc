// Packages of AOTInductor are in tests/programs/export_test.py.
#include "fulgur/programs/predictor.h"

#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/make_module.h"
#include "fulgur/programs/program.h"
#include "fulgur/trainer/trainer.h"
#include "tests/programs/archive_file.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using testing::archive_path;
using ::testing::HasSubstr;
using testing::message_of;
using testing::TinyModule;

struct Imported : Module {
  nn::Program net{nullptr};
  Imported() { net = register_module("net", nn::Program(archive_path("tiny"))); }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return torch::nn::functional::mse_loss(net->forward(batch["x"]), batch["y"]);
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-2}); }
};

class PredictorTest : public ::testing::Test {
 protected:
  // Trains the module, and returns its checkpoint.
  template <class M>
  fs::path train(const std::shared_ptr<M>& module, const std::string& name) {
    TrainerOptions options = testing::quiet({.max_epochs = 2});
    options.enable_checkpointing = true;
    options.default_root_dir = folder_.path();
    options.name = name;
    Trainer(options).fit(module, {.train = testing::tiny_loader()});
    return folder_.path() / "runs" / name / "checkpoints/last";
  }

  const testing::TempDir folder_;
  const Batch batch_{{"x", torch::randn({3, 4})}};
};

TEST_F(PredictorTest, AnswersWithAProgramAsItIs) {
  nn::Program net(archive_path("tiny"));
  net->eval();
  const at::Tensor answer = Predictor(archive_path("tiny")).run(batch_)["output"];
  EXPECT_TRUE(answer.equal(net->forward(batch_)["output"]));
  EXPECT_FALSE(answer.requires_grad());
}

TEST_F(PredictorTest, TakesTheWeightsOfAProgramOutOfACheckpointOfTheModuleThatTrainedIt) {
  const auto module = make_module<Imported>();
  const fs::path checkpoint = train(module, "imported");
  const Predictor predictor(archive_path("tiny"), {.weights = checkpoint});
  EXPECT_TRUE(predictor.run(batch_)["output"].equal(module->net->forward(batch_["x"])));
}

TEST_F(PredictorTest, AnswersWithWhatPredictStepDoes) {
  const auto module = make_module<TinyModule>();
  const at::Tensor untrained = module->forward(batch_["x"]);
  const fs::path checkpoint = train(module, "by_hand");
  const auto other = make_module<TinyModule>();
  const Predictor predictor(other, {.weights = checkpoint});
  EXPECT_TRUE(predictor.run(batch_)["y"].equal(module->forward(batch_["x"])));
  EXPECT_FALSE(predictor.run(batch_)["y"].equal(untrained));
  EXPECT_TRUE(other->is_training());
}

TEST_F(PredictorTest, EveryAnswerIsOfOneSetOfWeights) {
  const auto first = make_module<TinyModule>(), second = make_module<TinyModule>();
  const fs::path checkpoints[] = {train(first, "first"), train(second, "second")};
  const at::Tensor answers[] = {first->forward(batch_["x"]), second->forward(batch_["x"])};
  ASSERT_FALSE(answers[0].equal(answers[1]));
  Predictor predictor(first, {.weights = checkpoints[0]});
  std::atomic<bool> done = false;
  std::atomic<int> num_answers = 0, num_wrong = 0;
  std::vector<std::jthread> threads;
  const auto end = c10::make_scope_exit([&] { done = true; });
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!done) {
        const at::Tensor y = predictor.run(batch_)["y"];
        if (!y.equal(answers[0]) && !y.equal(answers[1])) ++num_wrong;
        ++num_answers;
      }
    });
  }
  while (num_answers == 0) std::this_thread::yield();
  for (size_t i = 0; i < 20; ++i) {
    predictor.set_weights(checkpoints[i % 2]);
    EXPECT_TRUE(predictor.run(batch_)["y"].equal(answers[i % 2]));
  }
  done = true;
  threads.clear();  // joins them
  EXPECT_EQ(num_wrong, 0);
  EXPECT_GT(num_answers, 0);
}

TEST_F(PredictorTest, KeepsItsWeightsIfOthersDoNotFit) {
  const fs::path checkpoint = train(make_module<TinyModule>(), "by_hand");
  Predictor predictor(archive_path("mlp"));
  const Batch batch{{"x", torch::randn({3, 4})}, {"scale", torch::ones({1})}};
  const at::Tensor before = predictor.run(batch)["logits"];
  const std::string mlp = archive_path("mlp").string();
  EXPECT_EQ(message_of<UsageError>([&] { predictor.set_weights(checkpoint); }),
            checkpoint.string() + " does not have the weights of " + mlp + " (block.0.bias, ...)");
  EXPECT_THAT(message_of<CheckpointError>([&] { predictor.set_weights(folder_.path() / "none"); }), HasSubstr("none"));
  EXPECT_TRUE(predictor.run(batch)["logits"].equal(before));
}

// A weight of which the program knows nothing, where the program's own are.
struct Larger : Imported {
  Larger() { net->register_parameter("more", torch::zeros({2})); }
};

TEST_F(PredictorTest, RefusesACheckpointOfALargerModel) {
  const fs::path checkpoint = train(make_module<Larger>(), "larger");
  const std::string tiny = archive_path("tiny").string();
  EXPECT_EQ(message_of<UsageError>([&] { Predictor(archive_path("tiny"), {.weights = checkpoint}); }),
            checkpoint.string() + " is of a larger model than " + tiny + ": it has 'net.more', too");
}

TEST_F(PredictorTest, SaysWhatIsWrong) {
  EXPECT_EQ(message_of<UsageError>([] { Predictor(make_module<TinyModule>(), {}); }),
            "a Predictor of a Module needs its weights: set PredictorOptions::weights to a checkpoint");
  EXPECT_EQ(message_of<UsageError>([] { Predictor(std::shared_ptr<TinyModule>(), {}); }),
            "the module of a Predictor is null");
  const fs::path text = folder_.path() / "net.pt2";
  std::ofstream(text) << "no archive";
  EXPECT_THAT(message_of<CheckpointError>([&] { Predictor{text}; }), HasSubstr("net.pt2"));
  EXPECT_THAT(message_of<CheckpointError>([] { Predictor{"missing.pt2"}; }), HasSubstr("missing.pt2"));
  const Predictor predictor(archive_path("tiny"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { predictor.run({{"xs", torch::ones({2, 4})}}); }),
              HasSubstr("did you mean 'xs'?"));
}

}  // namespace
}  // namespace fulgur
