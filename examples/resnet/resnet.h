#pragma once

#include <array>
#include <cstdint>

#include "fulgur.h"

namespace resnet {

// The residual block: two convolutions of 3 x 3, or one of 3 x 3 between two of 1 x 1 with a narrow middle.
enum class BlockType { basic, bottleneck };

// What distinguishes one ResNet from another; by default ResNet-18.
struct ResNetConfig {
  BlockType block = BlockType::basic;
  std::array<int64_t, 4> num_blocks = {2, 2, 2, 2};  // number for each stage
  int64_t width = 64;                                // channels of the first stage; each later stage doubles them
  int64_t in_channels = 3;
  int64_t num_classes = 1000;   // 0: no classifier, and forward() returns the features
  bool has_small_stem = false;  // true: starts with a 3 x 3 convolution of stride 1 and no pooling, for small images

  static ResNetConfig resnet18() { return {}; }
  static ResNetConfig resnet50() { return {.block = BlockType::bottleneck, .num_blocks = {3, 4, 6, 3}}; }

  int64_t num_features() const;  // channels of the last stage
};

// A residual network whose batch norm takes its statistics over all ranks. Parameters and buffers have the names and
// shapes of torchvision's, so that its checkpoints fit; like torchvision, a bottleneck has its stride in the 3 x 3
// convolution. The small stem is that of the article's networks for CIFAR.
// Source: He et al. 2015, arXiv:1512.03385.
class ResNetImpl final : public torch::nn::Module {
 public:
  explicit ResNetImpl(const ResNetConfig& config);

  // images: [batch_size, in_channels, height, width] of any size. Returns [batch_size, num_classes], or, without a
  // classifier, [batch_size, num_features].
  at::Tensor forward(const at::Tensor& images);

 private:
  torch::nn::Conv2d conv1_{nullptr};
  fulgur::nn::SyncBatchNorm2d bn1_{nullptr};
  torch::nn::MaxPool2d maxpool_{nullptr};  // null with a small stem
  std::array<torch::nn::Sequential, 4> stages_{nullptr, nullptr, nullptr, nullptr};
  torch::nn::Linear fc_{nullptr};  // null without a classifier
};
TORCH_MODULE(ResNet);

}  // namespace resnet
