#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fulgur/core/norm_launch.h"

namespace fulgur::gpu {

// Whether joint_norm_on_gpu can read a tensor: one of fp32, bf16 or fp16 without gaps on a GPU that kernels are for.
bool can_take_norm(const at::Tensor& tensor);

// The joint L2 norm of tensors of one GPU, for all of which can_take_norm() is true: fp64, 0-dim, on it. Nothing waits
// for the device. One launch for 1,200 tensors; no memory but a number for every 16,384 elements.
at::Tensor joint_norm_on_gpu(const std::vector<at::Tensor>& tensors);

// Whether clip_on_gpu can read a norm: one of fp64 on a GPU that kernels are for.
bool can_clip(const at::Tensor& norm);

// The norm times the mean, and the factor of core/gradient_clipping.h, clip_norm: two numbers of fp64 on the norm's
// device.
at::Tensor clip_on_gpu(const at::Tensor& norm, double mean, double max_norm);

// The launches for tensors; what they point to outside of the tensors is still null. Tensors without elements are left
// out.
std::vector<NormLaunch> plan_norm(const std::vector<at::Tensor>& tensors);

}  // namespace fulgur::gpu
