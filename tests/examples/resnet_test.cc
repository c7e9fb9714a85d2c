#include "examples/resnet/resnet.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "examples/resnet/image_classifier.h"
#include "examples/resnet/image_data.h"
#include "fulgur/distributed/world.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/tiny.h"

namespace resnet {
namespace {

using ::testing::HasSubstr;

int64_t num_parameters(const std::string& size) {
  int64_t count = 0;
  const ImageClassifier classifier({.size = size, .num_classes = 1000, .in_channels = 3});
  for (const at::Tensor& parameter : classifier.parameters()) count += parameter.numel();
  return count;
}

// The names and shapes of all that a checkpoint holds.
std::map<std::string, std::vector<int64_t>> state_of(const ResNetConfig& config) {
  ResNet net(config);
  std::map<std::string, std::vector<int64_t>> state;
  for (const auto& item : net->named_parameters()) state[item.key()] = item.value().sizes().vec();
  for (const auto& item : net->named_buffers()) state[item.key()] = item.value().sizes().vec();
  return state;
}

// The counts are those of torchvision's documentation.
TEST(ImageClassifier, HasAsManyParametersAsTorchvisions) {
  EXPECT_EQ(num_parameters("resnet18"), 11'689'512);
  EXPECT_EQ(num_parameters("article"), 25'557'032);
}

TEST(ResNet, NamesItsStateAsTorchvisionDoes) {
  const auto resnet18 = state_of(ResNetConfig::resnet18()), resnet50 = state_of(ResNetConfig::resnet50());
  EXPECT_EQ(resnet18.size(), 122u);
  EXPECT_EQ(resnet50.size(), 320u);
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(resnet18.at("conv1.weight"), (Shape{64, 3, 7, 7}));
  EXPECT_EQ(resnet18.at("bn1.num_batches_tracked"), Shape{});
  EXPECT_EQ(resnet18.at("layer2.0.downsample.0.weight"), (Shape{128, 64, 1, 1}));
  EXPECT_EQ(resnet18.at("layer2.0.downsample.1.running_var"), (Shape{128}));
  EXPECT_EQ(resnet18.at("layer4.1.conv2.weight"), (Shape{512, 512, 3, 3}));
  EXPECT_EQ(resnet50.at("layer1.0.downsample.0.weight"), (Shape{256, 64, 1, 1}));
  EXPECT_EQ(resnet50.at("layer3.5.conv3.weight"), (Shape{1024, 256, 1, 1}));
  EXPECT_EQ(resnet50.at("fc.weight"), (Shape{1000, 2048}));
}

TEST(ResNet, ReadsImagesOfAnySize) {
  const at::NoGradGuard no_grad;
  ResNet net(ResNetConfig{.width = 4, .num_classes = 7});
  EXPECT_EQ(net->forward(torch::randn({2, 3, 64, 40})).sizes(), (std::vector<int64_t>{2, 7}));
  ResNet small(ResNetConfig{
      .block = BlockType::bottleneck, .width = 4, .in_channels = 1, .num_classes = 0, .has_small_stem = true});
  EXPECT_EQ(small->forward(torch::randn({2, 1, 8, 8})).sizes(), (std::vector<int64_t>{2, 128}));
}

// Trains for three steps of eight images in fp64. Returns the parameters and buffers.
std::map<std::string, at::Tensor> trained_state(const std::shared_ptr<ImageClassifier>& model,
                                                const std::string& strategy, int64_t batch_size,
                                                const std::shared_ptr<fulgur::TensorDataset>& images) {
  model->to(at::kDouble);
  fulgur::Trainer trainer(fulgur::testing::quiet({.strategy = strategy, .max_epochs = 1, .precision = "64"}));
  trainer.fit(model, {.train = fulgur::DataLoader::make(images, {.batch_size = batch_size})});
  std::map<std::string, at::Tensor> state;
  for (const auto& item : model->named_parameters()) state[item.key()] = item.value().detach();
  for (const auto& item : model->named_buffers()) state[item.key()] = item.value();
  return state;
}

TEST(ImageClassifier, IsTheSameNetOnTwoRanksAsOnOneWithTheWholeBatch) {
  const auto model = [] {
    fulgur::seed_everything(1);
    return fulgur::make_module<ImageClassifier>(ImageClassifierOptions{});
  };
  const auto alone = model();
  const std::vector<std::shared_ptr<ImageClassifier>> by_rank = {model(), model()};
  const auto images = fulgur::TensorDataset::make(
      {{"image", torch::rand({24, 1, 8, 8})}, {"label", torch::randint(10, {24}, at::kLong)}});
  const at::Tensor initial = alone->named_parameters()["net.conv1.weight"].detach().to(at::kDouble, false, true);
  const auto expected = trained_state(alone, "single_device", 8, images);
  EXPECT_GT((expected.at("net.conv1.weight") - initial).abs().max().item<double>(), 1e-3);
  fulgur::testing::run_ranks(2, [&](fulgur::World& world) {
    const auto state = trained_state(by_rank[static_cast<size_t>(world.rank())], "ddp", 4, images);
    ASSERT_EQ(state.size(), expected.size());
    for (const auto& [name, tensor] : state) {
      EXPECT_TRUE(tensor.allclose(expected.at(name), 1e-9, 1e-12))
          << name << ": " << (tensor - expected.at(name)).abs().max().item<double>();
    }
  });
}

TEST(ImageClassifier, TheDataGiveClassesAndChannelsAndTheModelGivesTheSizeOfImages) {
  const auto linked = [](const std::string& size, ImageDataOptions data) {
    ImageClassifierOptions model{.size = size};
    link_options(model, data);
    return data.image_size;
  };
  EXPECT_EQ(linked("small", {}), 8);
  EXPECT_EQ(linked("resnet18", {}), 32);
  EXPECT_EQ(linked("article", {}), 224);
  EXPECT_EQ(linked("article", {.image_size = 16}), 16);

  const fulgur::testing::TempDir dir;
  for (const char* name : {"a", "b", "c"}) {
    std::filesystem::create_directories(dir.path() / "train" / name);
    std::ofstream(dir.path() / "train" / name / "never_read.png");
  }
  EXPECT_EQ(linked("small", {.path = dir.path()}), 32);
  EXPECT_EQ(linked("resnet18", {.path = dir.path()}), 224);
  ImageClassifierOptions model;
  ImageDataOptions data{.path = dir.path()};
  link_options(model, data);
  EXPECT_EQ(model.num_classes, 3);
  EXPECT_EQ(model.in_channels, 3);
}

TEST(ImageData, AFolderWithoutPartsIsRefused) {
  const fulgur::testing::TempDir dir;
  const ImageDataOptions options{.path = dir.path()};
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { options.num_classes(); }),
              HasSubstr("put pictures in " + dir.path().string() + "/train/<class>/"));
}

}  // namespace
}  // namespace resnet
