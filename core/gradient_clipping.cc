#include "fulgur/core/gradient_clipping.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>

#include "fulgur/base/parallel_chunks.h"
#include "fulgur/core/gpu_norm.h"
#include "fulgur/core/sum_of_squares.h"

namespace fulgur {
namespace {

constexpr int64_t kPieceElements = 1 << 16;
constexpr int64_t kPiecesPerThread = 4;  // fewer are not worth a thread

template <class Number>
double sum_over_pieces(const at::Tensor& tensor) {
  const Number* numbers = tensor.const_data_ptr<Number>();
  const int64_t count = tensor.numel(), num_pieces = (count + kPieceElements - 1) / kPieceElements;
  if (num_pieces <= 1) return sum_of_squares(numbers, static_cast<size_t>(count));
  std::vector<double> sums(static_cast<size_t>(num_pieces));
  parallel_chunks(numbers, num_pieces, kPiecesPerThread, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t begin = piece * kPieceElements, end = std::min(begin + kPieceElements, count);
      sums[static_cast<size_t>(piece)] = sum_of_squares(numbers + begin, static_cast<size_t>(end - begin));
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The sum of squares, in fp64, whose bits depend on neither threads nor instructions; nullopt for a tensor that the
// kernels cannot read.
std::optional<double> sum_on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.is_non_overlapping_and_dense()) return std::nullopt;
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return sum_over_pieces<float>(tensor);
    case at::kDouble:
      return sum_over_pieces<double>(tensor);
    case at::kBFloat16:
      return sum_over_pieces<c10::BFloat16>(tensor);
    default:
      return std::nullopt;
  }
}

// fp64 norms whose joint norm is that of the tensors. On a GPU our kernel gives one norm for all tensors, or torch's
// _foreach_norm one for each, adding in fp64. linalg_vector_norm, which copies to fp64, takes only the rest: fp16 on a
// CPU, fp64, and tensors with gaps.
std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> norms, by_our_kernel;
  std::map<c10::ScalarType, std::vector<at::Tensor>> on_gpu;
  for (const at::Tensor& tensor : tensors) {
    if (gpu::can_take_norm(tensor)) {
      by_our_kernel.push_back(tensor);
    } else if (tensor.is_cpu() || tensor.scalar_type() == at::kDouble || !tensor.is_non_overlapping_and_dense()) {
      norms.push_back(at::linalg_vector_norm(tensor, 2, std::nullopt, /*keepdim=*/false, at::kDouble));
    } else {
      on_gpu[tensor.scalar_type()].push_back(tensor);
    }
  }
  if (!by_our_kernel.empty()) norms.push_back(gpu::joint_norm_on_gpu(by_our_kernel));
  for (const auto& [dtype, same_kind] : on_gpu) {
    std::ranges::move(at::_foreach_norm(same_kind, 2, at::kDouble), std::back_inserter(norms));
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
  double squares = 0.0;  // sum over the tensors that the kernels can read
  std::vector<at::Tensor> others;
  for (const at::Tensor& tensor : tensors) {
    if (const std::optional<double> sum = sum_on_cpu(tensor)) {
      squares += *sum;
    } else {
      others.push_back(tensor);
    }
  }
  if (others.empty()) return at::scalar_tensor(std::sqrt(squares), at::kDouble);
  std::vector<at::Tensor> norms = norms_of(others);
  if (squares != 0.0) norms.push_back(at::scalar_tensor(std::sqrt(squares), at::kDouble));
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), 2);
}

at::Tensor clip_coefficient(const at::Tensor& norm, double max_norm) {
  return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
}

ClippedNorm clip_norm(const at::Tensor& norm, double mean, double max_norm) {
  if (gpu::can_clip(norm)) {
    const at::Tensor clipped = gpu::clip_on_gpu(norm, mean, max_norm);
    return {.norm = clipped.select(0, 0), .factor = clipped.select(0, 1)};
  }
  const at::Tensor scaled = norm.mul(mean);
  return {.norm = scaled, .factor = clip_coefficient(scaled, max_norm).mul(mean)};
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
