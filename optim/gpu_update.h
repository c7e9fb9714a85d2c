#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "fulgur/core/optimizer.h"
#include "fulgur/optim/update_plan.h"

namespace fulgur::optim {

// Whether a device has kernels for update_on_gpu; if not, use torch's.
bool has_update_kernels(c10::Device device);

// The update of an element-wise optimizer as one pass over the memory of a GPU, with the bits of fused_update. One
// launch updates up to 480 tensors by up to 16 rules, whatever their formats; the gradients are not changed. The update
// is queued on the current stream of the device without waiting for it, and `slices` may be freed as torch's caching
// allocator allows. All rules are of one optimizer, and the transform's factor is on the device. Throws c10::ValueError
// if a slice has numbers of another type than fp32, bf16 and fp16.
void update_on_gpu(const std::vector<gpu::RuleOfSlices>& rules, const std::vector<gpu::SliceOnGpu>& slices,
                   const GradientTransform& transform, c10::Device device);

}  // namespace fulgur::optim
