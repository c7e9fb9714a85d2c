#include "examples/resnet/resnet.h"

#include <fmt/format.h>

namespace resnet {
namespace {

using fulgur::nn::SyncBatchNorm2d;
namespace nn = torch::nn;

constexpr int64_t kBottleneckExpansion = 4;

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// What the input passes through if its shape is not that of the block's output; null if it is.
nn::Sequential downsample(int64_t in, int64_t out, int64_t stride) {
  if (in == out && stride == 1) return nullptr;
  return nn::Sequential(conv(in, out, 1, stride), SyncBatchNorm2d(out));
}

class BasicBlockImpl final : public nn::Module {
 public:
  BasicBlockImpl(int64_t in, int64_t width, int64_t stride) {
    conv1_ = register_module("conv1", conv(in, width, 3, stride));
    bn1_ = register_module("bn1", SyncBatchNorm2d(width));
    conv2_ = register_module("conv2", conv(width, width, 3, 1));
    bn2_ = register_module("bn2", SyncBatchNorm2d(width));
    if (auto shortcut = downsample(in, width, stride)) downsample_ = register_module("downsample", shortcut);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = at::relu(bn1_->forward(conv1_->forward(x)));
    const auto residual = bn2_->forward(conv2_->forward(hidden));
    return at::relu(residual + (downsample_ ? downsample_->forward(x) : x));
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  SyncBatchNorm2d bn1_{nullptr}, bn2_{nullptr};
  nn::Sequential downsample_{nullptr};
};
TORCH_MODULE(BasicBlock);

class BottleneckImpl final : public nn::Module {
 public:
  BottleneckImpl(int64_t in, int64_t width, int64_t stride) {
    const int64_t out = width * kBottleneckExpansion;
    conv1_ = register_module("conv1", conv(in, width, 1, 1));
    bn1_ = register_module("bn1", SyncBatchNorm2d(width));
    conv2_ = register_module("conv2", conv(width, width, 3, stride));
    bn2_ = register_module("bn2", SyncBatchNorm2d(width));
    conv3_ = register_module("conv3", conv(width, out, 1, 1));
    bn3_ = register_module("bn3", SyncBatchNorm2d(out));
    if (auto shortcut = downsample(in, out, stride)) downsample_ = register_module("downsample", shortcut);
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto narrow = at::relu(bn1_->forward(conv1_->forward(x)));
    const auto hidden = at::relu(bn2_->forward(conv2_->forward(narrow)));
    const auto residual = bn3_->forward(conv3_->forward(hidden));
    return at::relu(residual + (downsample_ ? downsample_->forward(x) : x));
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr}, conv3_{nullptr};
  SyncBatchNorm2d bn1_{nullptr}, bn2_{nullptr}, bn3_{nullptr};
  nn::Sequential downsample_{nullptr};
};
TORCH_MODULE(Bottleneck);

int64_t expansion(BlockType block) { return block == BlockType::basic ? 1 : kBottleneckExpansion; }

nn::Sequential stage(BlockType block, int64_t num_blocks, int64_t in, int64_t width, int64_t stride) {
  nn::Sequential blocks;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t block_in = i == 0 ? in : width * expansion(block);
    const int64_t block_stride = i == 0 ? stride : 1;
    if (block == BlockType::basic) {
      blocks->push_back(BasicBlock(block_in, width, block_stride));
    } else {
      blocks->push_back(Bottleneck(block_in, width, block_stride));
    }
  }
  return blocks;
}

}  // namespace

int64_t ResNetConfig::num_features() const { return 8 * width * expansion(block); }

ResNetImpl::ResNetImpl(const ResNetConfig& config) {
  const bool is_small = config.has_small_stem;
  conv1_ = register_module("conv1", conv(config.in_channels, config.width, is_small ? 3 : 7, is_small ? 1 : 2));
  bn1_ = register_module("bn1", SyncBatchNorm2d(config.width));
  if (!is_small) {
    maxpool_ = register_module("maxpool", nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  }
  int64_t in = config.width;
  for (size_t i = 0; i < stages_.size(); ++i) {
    const int64_t width = config.width << i;
    stages_[i] = register_module(fmt::format("layer{}", i + 1),
                                 stage(config.block, config.num_blocks[i], in, width, i == 0 ? 1 : 2));
    in = width * expansion(config.block);
  }
  if (config.num_classes > 0) fc_ = register_module("fc", nn::Linear(in, config.num_classes));
  for (const auto& parameter : named_parameters()) {
    if (parameter.value().dim() == 4) nn::init::kaiming_normal_(parameter.value(), 0.0, torch::kFanOut, torch::kReLU);
  }
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  auto x = at::relu(bn1_->forward(conv1_->forward(images)));
  if (maxpool_) x = maxpool_->forward(x);
  for (auto& blocks : stages_) x = blocks->forward(x);
  const auto features = x.mean({2, 3});
  return fc_ ? fc_->forward(features) : features;
}

}  // namespace resnet
