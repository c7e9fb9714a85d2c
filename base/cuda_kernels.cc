#include "fulgur/base/cuda_kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "fulgur/base/cuda_function.h"

#ifdef FULGUR_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fulgur {

device_code::Format format_of(c10::ScalarType type) {
  if (type == c10::ScalarType::Float) return device_code::Format::fp32;
  if (type == c10::ScalarType::BFloat16) return device_code::Format::bf16;
  return type == c10::ScalarType::Half ? device_code::Format::fp16 : device_code::Format::none;
}

#ifdef FULGUR_HAS_CUDA
namespace {

#define FULGUR_RUNTIME_FUNCTION(name) cuda_function<decltype(::name)>(#name)

void check(cudaError_t error, const char* what, const char* name) {
  if (error == cudaSuccess) return;
  FULGUR_RUNTIME_FUNCTION(cudaGetLastError)();  // so that torch does not report it as the error of a later call
  TORCH_CHECK(false, "CUDA could not ", what, " fulgur's kernel ", name, ": ",
              FULGUR_RUNTIME_FUNCTION(cudaGetErrorString)(error));
}

}  // namespace

int compute_capability(c10::Device device) {
  auto* const get_attribute = FULGUR_RUNTIME_FUNCTION(cudaDeviceGetAttribute);
  int major = 0, minor = 0;
  if (!device.is_cuda() || get_attribute == nullptr) return 0;
  if (get_attribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
      get_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()) == cudaSuccess) {
    return 10 * major + minor;
  }
  FULGUR_RUNTIME_FUNCTION(cudaGetLastError)();  // so that torch does not report it as the error of a later call
  return 0;
}

bool CudaKernels::can_run_on(c10::Device device) {
  if (!device.is_cuda()) return false;
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, bool> known;
  const std::lock_guard lock(mutex);
  const auto [entry, is_first] = known.try_emplace(device.index(), false);
  if (is_first) {
    entry->second = FULGUR_RUNTIME_FUNCTION(cudaLibraryLoadData) != nullptr && compute_capability(device) >= 80;
  }
  return entry->second;
}

void* CudaKernels::kernel(const char* name) {
  const std::lock_guard lock(mutex_);
  if (library_ == nullptr) {
    cudaLibrary_t library = nullptr;
    check(FULGUR_RUNTIME_FUNCTION(cudaLibraryLoadData)(&library, image_, nullptr, nullptr, 0, nullptr, nullptr, 0),
          "load", name);
    library_ = library;
  }
  void*& found = kernels_[name];
  if (found == nullptr) {
    cudaKernel_t kernel = nullptr;
    check(FULGUR_RUNTIME_FUNCTION(cudaLibraryGetKernel)(&kernel, static_cast<cudaLibrary_t>(library_), name), "find",
          name);
    found = kernel;
  }
  return found;
}

void CudaKernels::launch(const char* name, uint32_t num_blocks, const void* argument, c10::Device device) {
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  void* arguments[] = {const_cast<void*>(argument)};
  check(
      FULGUR_RUNTIME_FUNCTION(cudaLaunchKernel)(kernel(name), dim3(num_blocks), dim3(device_code::kThreads), arguments,
                                                /*sharedMem=*/0, static_cast<cudaStream_t>(stream.native_handle())),
      "launch", name);
}

#else

int compute_capability(c10::Device /*device*/) { return 0; }

bool CudaKernels::can_run_on(c10::Device /*device*/) { return false; }

void CudaKernels::launch(const char* name, uint32_t /*num_blocks*/, const void* /*argument*/, c10::Device /*device*/) {
  TORCH_INTERNAL_ASSERT(false, name, ": this fulgur was built without kernels for GPUs");
}

#endif

}  // namespace fulgur
