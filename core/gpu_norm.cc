#include "fulgur/core/gpu_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "fulgur/base/cuda_kernels.h"
#include "fulgur/core/norm_kernels.h"

namespace fulgur::gpu {

std::vector<NormLaunch> plan_norm(const std::vector<at::Tensor>& tensors) {
  std::vector<NormLaunch> launches;
  uint32_t num_sums = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (launches.empty() || launches.back().num_rows == kMaxTensors) launches.emplace_back().first_sum = num_sums;
    NormLaunch& launch = launches.back();
    const Format format = format_of(tensor.scalar_type());
    const auto num_blocks = static_cast<uint32_t>((tensor.numel() + kBlockElements - 1) / kBlockElements);
    launch.rows[launch.num_rows++] = {.numbers = tensor.const_data_ptr(),
                                      .num_elements = tensor.numel(),
                                      .first_block = launch.num_blocks,
                                      .format = format,
                                      .is_aligned = device_code::is_aligned(tensor.const_data_ptr(), format)};
    launch.num_blocks += num_blocks;
    num_sums += num_blocks;
  }
  for (NormLaunch& launch : launches) launch.num_sums = num_sums;
  return launches;
}

#ifdef FULGUR_HAS_CUDA_KERNELS
namespace {

CudaKernels& kernels() {
  static CudaKernels loaded(fulgur_core_norm_kernels);
  return loaded;
}

// A counter that is 0 between launches, for the current stream alone, because norms on several streams may be taken at
// the same time. It is never freed: at the end of the process CUDA may be gone before it.
uint32_t* counter_of_stream(c10::Device device) {
  static auto* const mutex = new std::mutex;
  static auto* const counters = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, at::Tensor>;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const std::lock_guard lock(*mutex);
  at::Tensor& counter = (*counters)[{device.index(), stream.id()}];
  if (!counter.defined()) counter = at::zeros({1}, at::device(device).dtype(at::kInt));
  return reinterpret_cast<uint32_t*>(counter.mutable_data_ptr<int32_t>());
}

}  // namespace

bool can_take_norm(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.is_non_overlapping_and_dense() && format_of(tensor.scalar_type()) != Format::none &&
         CudaKernels::can_run_on(tensor.device());
}

at::Tensor joint_norm_on_gpu(const std::vector<at::Tensor>& tensors) {
  const c10::Device device = tensors.at(0).device();
  const at::TensorOptions options = at::device(device).dtype(at::kDouble);
  std::vector<NormLaunch> launches = plan_norm(tensors);
  if (launches.empty()) return at::zeros({}, options);
  const at::Tensor norm = at::empty({}, options), sums = at::empty({launches.front().num_sums}, options);
  uint32_t* const num_done = counter_of_stream(device);
  for (NormLaunch& launch : launches) {
    launch.sums = sums.mutable_data_ptr<double>();
    launch.num_done = num_done;
    launch.norm = norm.mutable_data_ptr<double>();
    kernels().launch("fulgur_norm", launch.num_blocks, &launch, device);
  }
  return norm;
}

bool can_clip(const at::Tensor& norm) {
  return norm.is_cuda() && norm.scalar_type() == at::kDouble && CudaKernels::can_run_on(norm.device());
}

at::Tensor clip_on_gpu(const at::Tensor& norm, double mean, double max_norm) {
  const at::Tensor clipped = at::empty({2}, norm.options());
  const ClipLaunch launch{.norm = norm.const_data_ptr<double>(),
                          .mean = mean,
                          .max_norm = max_norm,
                          .clipped = clipped.mutable_data_ptr<double>()};
  kernels().launch("fulgur_clip", /*num_blocks=*/1, &launch, norm.device());
  return clipped;
}

#else

bool can_clip(const at::Tensor& /*norm*/) { return false; }

at::Tensor clip_on_gpu(const at::Tensor& /*norm*/, double /*mean*/, double /*max_norm*/) {
  TORCH_INTERNAL_ASSERT(false, "this fulgur was built without kernels for GPUs");
}

bool can_take_norm(const at::Tensor& /*tensor*/) { return false; }

at::Tensor joint_norm_on_gpu(const std::vector<at::Tensor>& /*tensors*/) {
  TORCH_INTERNAL_ASSERT(false, "this fulgur was built without kernels for GPUs");
}

#endif

}  // namespace fulgur::gpu
