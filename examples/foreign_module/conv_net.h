#pragma once

#include <torch/nn.h>

// A small convolutional network as in libtorch's MNIST tutorial, for images of 8 x 8 pixels.
class ConvNetImpl : public torch::nn::Module {
 public:
  ConvNetImpl();

  // images: float [batch_size, 1, 8, 8]. Returns the logarithms of the probabilities of the classes, [batch_size, 10].
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Conv2d conv1_, conv2_;
  torch::nn::Dropout dropout_;
  torch::nn::Linear fc1_, fc2_;
};
TORCH_MODULE(ConvNet);
