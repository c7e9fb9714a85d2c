#include "fulgur/optim/gpu_update.h"

#include <c10/util/Exception.h>

#include <limits>

#include "fulgur/base/cuda_kernels.h"
#include "fulgur/optim/update_kernels.h"

namespace fulgur::optim {

#ifdef FULGUR_HAS_CUDA_KERNELS
namespace {

CudaKernels& kernels() {
  static CudaKernels loaded(fulgur_optim_update_kernels);
  return loaded;
}

const char* kernel_name(const Rule& rule) {
  constexpr const char* kNames[] = {"fulgur_update_adam", "fulgur_update_sgd", "fulgur_update_adagrad",
                                    "fulgur_update_rmsprop", "fulgur_update_lion"};
  static_assert(std::size(kNames) == std::variant_size_v<Rule>);
  return kNames[rule.index()];
}

}  // namespace

bool has_update_kernels(c10::Device device) { return CudaKernels::can_run_on(device); }

void update_on_gpu(const std::vector<gpu::RuleOfSlices>& rules, const std::vector<gpu::SliceOnGpu>& slices,
                   const GradientTransform& transform, c10::Device device) {
  if (rules.empty()) return;
  const double* const factor = transform.factor.defined() ? transform.factor.const_data_ptr<double>() : nullptr;
  const double clip_value = transform.clip_value.value_or(std::numeric_limits<double>::infinity());
  gpu::with_step_of(rules.front().rule, [&]<class Step>() {
    for (const auto& launch : gpu::plan_update<Step>(rules, slices, factor, clip_value)) {
      kernels().launch(kernel_name(rules.front().rule), launch.num_blocks, &launch, device);
    }
  });
}

#else

bool has_update_kernels(c10::Device /*device*/) { return false; }

void update_on_gpu(const std::vector<gpu::RuleOfSlices>& /*rules*/, const std::vector<gpu::SliceOnGpu>& /*slices*/,
                   const GradientTransform& /*transform*/, c10::Device /*device*/) {
  TORCH_INTERNAL_ASSERT(false, "this fulgur was built without kernels for GPUs");
}

#endif

}  // namespace fulgur::optim
