#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fulgur/core/norm_launch.h"

namespace fulgur::gpu {

// Whether joint_norm_on_gpu can read a tensor: fp32, bf16 or fp16, without gaps, on a GPU that can run the kernels.
bool can_take_norm(const at::Tensor& tensor);

// The joint L2 norm of tensors on one GPU: fp64, 0-dim, on that GPU. can_take_norm() must be true for each tensor. Does
// not wait for the device. Takes one launch for every 1,200 tensors, and memory for one number per 16,384 elements.
at::Tensor joint_norm_on_gpu(const std::vector<at::Tensor>& tensors);

// Whether clip_on_gpu can read a norm: fp64, on a GPU that can run the kernels.
bool can_clip(const at::Tensor& norm);

// The norm times the mean, and the factor of core/gradient_clipping.h, clip_norm: two numbers of fp64 on the norm's
// device.
at::Tensor clip_on_gpu(const at::Tensor& norm, double mean, double max_norm);

// Plans the launches for the tensors, leaving out those without elements. Pointers to other memory are still null.
std::vector<NormLaunch> plan_norm(const std::vector<at::Tensor>& tensors);

}  // namespace fulgur::gpu
