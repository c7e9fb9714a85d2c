#include "examples/resnet/resnet.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "examples/resnet/image_data.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_dir.h"

namespace resnet {
namespace {

using ::testing::HasSubstr;

int64_t num_parameters(const ResNetConfig& config) {
  int64_t count = 0;
  for (const at::Tensor& parameter : ResNet(config)->parameters()) count += parameter.numel();
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
TEST(ResNet, HasAsManyParametersAsTorchvisions) {
  EXPECT_EQ(num_parameters(ResNetConfig::resnet18()), 11'689'512);
  EXPECT_EQ(num_parameters(ResNetConfig::resnet50()), 25'557'032);
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

TEST(ImageData, AFolderWithoutPartsIsRefused) {
  const fulgur::testing::TempDir dir;
  const ImageDataOptions options{.path = dir.path()};
  EXPECT_THAT(fulgur::testing::message_of<fulgur::UsageError>([&] { options.num_classes(); }),
              HasSubstr("put pictures in " + dir.path().string() + "/train/<class>/"));
}

}  // namespace
}  // namespace resnet
