#include "fulgur/core/gradient_clipping.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <map>
#include <optional>

namespace fulgur {
namespace {

constexpr int64_t kPieceElements = 1 << 18;  // 2 MiB in fp64

// linalg_vector_norm makes an fp64 copy of its tensor before it adds.
at::Tensor norm_of_copy(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor, 2, std::nullopt, /*keepdim=*/false, at::kDouble);
}

at::Tensor norm_by_pieces(const at::Tensor& tensor) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& piece : tensor.as_strided({tensor.numel()}, {1}).split(kPieceElements)) {
    norms.push_back(norm_of_copy(piece));
  }
  return at::linalg_vector_norm(at::stack(norms), 2);
}

// The norm of each tensor, in fp64, without a copy of a large one: a GPU has a kernel that adds in fp64 for many
// tensors of one type at once, which the CPU does not have.
std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> norms(tensors.size());
  std::map<c10::ScalarType, std::vector<size_t>> on_gpu;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool is_small = tensor.is_cpu() && tensor.numel() <= kPieceElements;
    if (is_small || tensor.scalar_type() == at::kDouble || !tensor.is_non_overlapping_and_dense()) {
      norms[i] = norm_of_copy(tensor);
    } else if (tensor.is_cpu()) {
      norms[i] = norm_by_pieces(tensor);
    } else {
      on_gpu[tensor.scalar_type()].push_back(i);
    }
  }
  for (const auto& [dtype, indices] : on_gpu) {
    std::vector<at::Tensor> same_kind;
    for (const size_t i : indices) same_kind.push_back(tensors[i]);
    const std::vector<at::Tensor> their_norms = at::_foreach_norm(same_kind, 2, at::kDouble);
    for (size_t j = 0; j < indices.size(); ++j) norms[indices[j]] = their_norms[j];
  }
  return norms;
}

}  // namespace

at::Tensor gradient_norm(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) gradients.push_back(param.grad());
  }
  return joint_norm(gradients);
}

at::Tensor joint_norm(const std::vector<at::Tensor>& tensors) {
  const c10::NoGradGuard no_grad;
  if (tensors.empty()) return at::zeros({}, at::kDouble);
  const std::vector<at::Tensor> norms = norms_of(tensors);
  if (norms.size() == 1) return norms.front();
  return at::linalg_vector_norm(at::stack(norms), 2);
}

at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm) {
  return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
}

void clip_gradients(const std::vector<at::Tensor>& params, const GradientClipping& clipping) {
  if (!clipping.active()) return;
  const c10::NoGradGuard no_grad;
  if (clipping.algorithm == ClipAlgorithm::norm) {
    scale_gradients(params, clip_coefficient(gradient_norm(params), clipping.value));
    return;
  }
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) param.mutable_grad().clamp_(-clipping.value, clipping.value);
  }
}

void scale_gradients(const std::vector<at::Tensor>& params, const at::Tensor& factor) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) param.mutable_grad().mul_(factor);
  }
}

}  // namespace fulgur
