#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "fulgur/core/optimizer.h"
#include "fulgur/optim/update_plan.h"

namespace fulgur::optim {

// Whether a device has kernels for update_on_gpu. Otherwise torch's are to be used.
bool has_update_kernels(c10::Device device);

// The update of an element-wise optimizer as one pass over the memory of a GPU, as fused_update is over that of a CPU
// and with its bits. One launch for 480 tensors and 16 rules, whatever their formats; the gradients are not changed.
// Queued on the current stream of the device: nothing waits for it, and `slices` may be freed as torch's caching
// allocator allows. All rules are of one optimizer, and the transform's factor is on the device. Throws c10::ValueError
// if a slice has numbers of another type than fp32, bf16 and fp16.
void update_on_gpu(const std::vector<gpu::RuleOfSlices>& rules, const std::vector<gpu::SliceOnGpu>& slices,
                   const GradientTransform& transform, c10::Device device);

}  // namespace fulgur::optim
