#include "examples/swav/swav.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/swav/crops_data.h"
#include "examples/swav/losses.h"
#include "examples/swav/multi_crop.h"
#include "examples/swav/sinkhorn.h"
#include "fulgur/distributed/world.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/tiny.h"

namespace swav {
namespace {

at::Tensor itself(const at::Tensor& tensor) { return tensor; }

at::Tensor random_scores(int64_t num_samples, int64_t num_prototypes) {
  fulgur::seed_everything(1);
  return torch::rand({num_samples, num_prototypes}) * 2 - 1;
}

TEST(Sinkhorn, RowsAddUpToOneAndPrototypesAreUsedAlike) {
  const at::Tensor scores = random_scores(12, 4);
  const at::Tensor codes = sinkhorn(scores, {.epsilon = 0.5, .num_iterations = 200}, itself);
  EXPECT_TRUE(codes.sum(1).allclose(torch::ones({12}), 1e-5, 1e-5));
  EXPECT_TRUE(codes.sum(0).allclose(torch::full({4}, 3.0), 1e-4, 1e-4));
  // The optimal transport with entropy is diag(u) exp(scores / epsilon) diag(v): logarithms differ by rows and columns.
  const at::Tensor rest = codes.log() - scores / 0.5;
  const at::Tensor centred = rest - rest.mean(0, true) - rest.mean(1, true) + rest.mean();
  EXPECT_LT(centred.abs().max().item<double>(), 1e-4);
}

TEST(Sinkhorn, ABatchOverTwoRanksHasTheCodesOfTheWholeBatch) {
  const at::Tensor scores = random_scores(12, 4);
  const at::Tensor whole = sinkhorn(scores, {}, itself);
  for (const int64_t world_size : {2, 3}) {
    std::vector<at::Tensor> parts(static_cast<size_t>(world_size));
    fulgur::testing::run_ranks(world_size, [&](fulgur::World& world) {
      const auto rank = world.rank();
      const auto sum = [&](const at::Tensor& tensor) {
        at::Tensor total = tensor.clone();
        world.data().all_reduce(total).wait();
        return total;
      };
      parts[static_cast<size_t>(rank)] = sinkhorn(scores.chunk(world_size)[static_cast<size_t>(rank)], {}, sum);
    });
    EXPECT_TRUE(at::cat(parts).allclose(whole, 1e-4, 1e-6)) << world_size;
  }
}

// Equations 1 and 2 of the article, written out.
TEST(SwappedPredictionLoss, EachCropPredictsTheCodesOfTheOthers) {
  constexpr int64_t kNumCrops = 3, kBatchSize = 2, kNumPrototypes = 4;
  const at::Tensor scores = random_scores(kNumCrops * kBatchSize, kNumPrototypes).view({kNumCrops, kBatchSize, -1});
  const at::Tensor codes = torch::rand({2, kBatchSize, kNumPrototypes}).softmax(-1);
  double sum = 0.0;
  for (int64_t large = 0; large < 2; ++large) {
    for (int64_t crop = 0; crop < kNumCrops; ++crop) {
      if (crop == large) continue;
      for (int64_t i = 0; i < kBatchSize; ++i) {
        double partition = 0.0;
        for (int64_t k = 0; k < kNumPrototypes; ++k) partition += std::exp(scores[crop][i][k].item<double>() / 0.1);
        for (int64_t k = 0; k < kNumPrototypes; ++k)
          sum -= codes[large][i][k].item<double>() * (scores[crop][i][k].item<double>() / 0.1 - std::log(partition));
      }
    }
  }
  EXPECT_NEAR(swapped_prediction_loss(codes, scores, 0.1).item<double>(), sum / (2 * 2 * kBatchSize), 1e-4);
}

// Equation 1 of the article, written out.
TEST(NtXentLoss, EachViewIsToFindTheOtherViewOfItsImage) {
  fulgur::seed_everything(1);
  const at::Tensor views = torch::randn({6, 5}).renorm(2, 0, 1.0);
  double sum = 0.0;
  for (int64_t i = 0; i < 6; ++i) {
    const auto similarity = [&](int64_t j) { return views[i].dot(views[j]).item<double>() / 0.5; };
    double others = 0.0;
    for (int64_t j = 0; j < 6; ++j) others += j == i ? 0.0 : std::exp(similarity(j));
    sum += std::log(others) - similarity((i + 3) % 6);
  }
  const auto parts = views.split(3);
  EXPECT_NEAR(nt_xent_loss(parts[0], parts[1], 0.5).item<double>(), sum / 6, 1e-5);
}

// The gradients of a step, by the names of parameters, as the optimizer gets them.
using Gradients = std::map<std::string, at::Tensor>;

struct GradientKeeper final : fulgur::Callback {
  Gradients gradients{};
  bool wants_gradients() const override { return true; }
  void on_before_optimizer_step(fulgur::TrainerControl& trainer, fulgur::Optimizer&) override {
    for (const auto& item : trainer.module().named_parameters()) gradients[item.key()] = item.value().grad().clone();
  }
};

Gradients gradients_of_first_step(const std::shared_ptr<Swav>& model, const std::string& strategy,
                                  const std::shared_ptr<fulgur::TensorDataset>& crops, int64_t batch_size) {
  const auto keeper = std::make_shared<GradientKeeper>();
  fulgur::Trainer trainer(
      fulgur::testing::quiet({.strategy = strategy, .max_steps = 1, .precision = "64", .callbacks = {keeper}}));
  trainer.fit(model, {.train = fulgur::DataLoader::make(crops, {.batch_size = batch_size})});
  return keeper->gradients;
}

class Objective : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Swav, Objective, ::testing::Values("swav", "simclr"),
                         [](const auto& test) { return test.param; });

// One rank differentiates all rows; on two, each rank has a graph of its own rows only.
TEST_P(Objective, TwoRanksHaveTheGradientsOfOneWithTheWholeBatch) {
  constexpr int64_t kBatchSize = 16;
  const auto model = [] {
    fulgur::seed_everything(1);
    return fulgur::make_module<Swav>(SwavOptions{.objective = GetParam(), .freeze_prototypes_steps = 0});
  };
  const auto alone = model();
  const std::vector<std::shared_ptr<Swav>> by_rank = {model(), model()};
  const auto crops = fulgur::TensorDataset::make(
      {{"large", torch::rand({kBatchSize, 2, 1, 8, 8})}, {"small", torch::rand({kBatchSize, 2, 1, 6, 6})}});
  const Gradients expected = gradients_of_first_step(alone, "single_device", crops, kBatchSize);
  ASSERT_GT(expected.at("encoder.conv1.weight").abs().max().item<double>(), 1e-4);
  fulgur::testing::run_ranks(2, [&](fulgur::World& world) {
    const auto& own = by_rank[static_cast<size_t>(world.rank())];
    const Gradients gradients = gradients_of_first_step(own, "ddp", crops, kBatchSize / 2);
    ASSERT_EQ(gradients.size(), expected.size());
    for (const auto& [name, gradient] : gradients) {
      const at::Tensor difference = gradient - expected.at(name);
      EXPECT_TRUE(gradient.allclose(expected.at(name), 1e-9, 1e-12))
          << name << ": " << difference.abs().max().item<double>();
    }
  });
}

TEST(Swav, PrototypesAreTrainedFromTheGivenStepOn) {
  const auto crops =
      fulgur::TensorDataset::make({{"large", torch::rand({16, 2, 1, 8, 8})}, {"small", torch::rand({16, 2, 1, 6, 6})}});
  const auto prototypes_after = [&](int64_t max_steps) {
    fulgur::seed_everything(1);
    const auto model = fulgur::make_module<Swav>(SwavOptions{.freeze_prototypes_steps = 2});
    const auto before = model->named_parameters()["prototypes.weight"].detach().clone();
    fulgur::Trainer trainer(fulgur::testing::quiet({.max_steps = max_steps}));
    trainer.fit(model, {.train = fulgur::DataLoader::make(crops, {.batch_size = 4})});
    return std::pair(before, model->named_parameters()["prototypes.weight"].detach().clone());
  };
  const auto [initial, after_two] = prototypes_after(2);
  EXPECT_TRUE(after_two.equal(initial));
  EXPECT_FALSE(prototypes_after(3).second.equal(initial));
}

// The authors' resnet50 has 28,354,752 parameters with pictures in colour, of which 23,508,032 are the ResNet's.
TEST(Swav, HasAsManyParametersAsTheArticles) {
  const Swav model({.size = "article", .in_channels = 3});
  int64_t count = 0;
  for (const at::Tensor& parameter : model.parameters()) count += parameter.numel();
  EXPECT_EQ(count, 23'508'032 + (2048 * 2048 + 2048) + 2 * 2048 + (2048 * 128 + 128) + 128 * 3000);
}

TEST(Swav, GivenCropsStayWhatTheyAre) {
  const auto linked = [](SwavOptions model, MultiCropOptions crops) {
    CropsDataOptions data{.crops = crops};
    link_options(model, data);
    return data.crops;
  };
  const MultiCropOptions article = linked({.size = "article"}, {});
  EXPECT_EQ(article.num_small, 6);
  EXPECT_EQ(article.large_size, 224);
  EXPECT_EQ(article.small_size, 96);
  const MultiCropOptions given = linked({.size = "article"}, {.num_small = 2, .large_size = 8, .small_size = 8});
  EXPECT_EQ(given.num_small, 2);
  EXPECT_EQ(given.large_size, 8);
  EXPECT_EQ(given.small_size, 8);
  EXPECT_EQ(linked({.objective = "simclr", .size = "article"}, {}).num_small, 0);
  EXPECT_THAT(
      fulgur::testing::message_of<fulgur::UsageError>([&] { linked({.objective = "simclr"}, {.num_small = 2}); }),
      ::testing::HasSubstr("num_small is 2, but simclr compares the two large crops alone"));
}

TEST(MultiCrop, WithoutChangesALargeCropIsTheImage) {
  fulgur::Random random(1);
  const at::Tensor image = torch::rand({1, 8, 8});
  const MultiCropOptions options{.num_small = 3, .small_size = 5, .large_area = {1, 1}, .max_rotation = 0, .noise = 0};
  const fulgur::Batch views = multi_crop(image, options, random);
  EXPECT_EQ(views["large"].sizes(), (std::vector<int64_t>{2, 1, 8, 8}));
  EXPECT_EQ(views["small"].sizes(), (std::vector<int64_t>{3, 1, 5, 5}));
  EXPECT_TRUE(views["large"][0].allclose(image, 1e-5, 1e-5));
  EXPECT_TRUE(views["large"][1].allclose(image, 1e-5, 1e-5));
  EXPECT_FALSE(views["small"][0].allclose(views["small"][1]));
}

TEST(MultiCrop, ASmallerAreaIsAPartOfTheImage) {
  fulgur::Random random(1);
  const at::Tensor bright = torch::ones({1, 8, 8});  // only what lies outside is black
  const MultiCropOptions options{
      .num_small = 20, .small_size = 5, .small_area = {0.25, 0.25}, .max_rotation = 0, .noise = 0};
  const at::Tensor inner = multi_crop(bright, options, random)["small"].slice(2, 1, 4).slice(3, 1, 4);
  EXPECT_TRUE(inner.allclose(torch::ones_like(inner)));
}

}  // namespace
}  // namespace swav
