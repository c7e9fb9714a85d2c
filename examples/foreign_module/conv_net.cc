#include "examples/foreign_module/conv_net.h"

ConvNetImpl::ConvNetImpl()
    : conv1_(register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 10, 3).padding(1)))),
      conv2_(register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(10, 20, 3).padding(1)))),
      dropout_(register_module("dropout", torch::nn::Dropout(0.25))),
      fc1_(register_module("fc1", torch::nn::Linear(20 * 4 * 4, 50))),
      fc2_(register_module("fc2", torch::nn::Linear(50, 10))) {}

torch::Tensor ConvNetImpl::forward(const torch::Tensor& images) {
  torch::Tensor x = torch::relu(conv1_->forward(images));
  x = torch::max_pool2d(torch::relu(conv2_->forward(x)), 2);
  x = torch::relu(fc1_->forward(x.flatten(1)));
  return torch::log_softmax(fc2_->forward(dropout_->forward(x)), 1);
}
