#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "fulgur/base/device_code.h"

namespace fulgur {

// The kernels' name for a scalar type; Format::none: no kernel reads that type.
device_code::Format format_of(c10::ScalarType type);

// The compute capability of a GPU, times ten: 90 for 9.0, as in nvcc's sm_90. 0 for other devices, and if fulgur was
// built without CUDA.
int compute_capability(c10::Device device);

// Launches the kernels that tools/cuda.bzl compiles from a .cu file. They are loaded at the first launch and stay
// loaded until the process ends.
//
//   CudaKernels& kernels() {
//     static CudaKernels loaded(fulgur_optim_update_kernels);
//     return loaded;
//   }
//   if (CudaKernels::can_run_on(device)) kernels().launch("fulgur_update_adam", num_blocks, &argument, device);
//
// The functions of the CUDA runtime come from libtorch (base/cuda_function.h). Threading: any thread.
class CudaKernels {
 public:
  explicit CudaKernels(const unsigned char* image) : image_(image) {}

  // True for a GPU of compute capability 8.0 or later; false for every device if fulgur was built without CUDA.
  static bool can_run_on(c10::Device device);

  // Queues a kernel on the current stream of the device, with blocks of device_code::kThreads threads. Its one argument
  // is copied. Throws c10::Error with CUDA's message.
  void launch(const char* name, uint32_t num_blocks, const void* argument, c10::Device device);

 private:
  void* kernel(const char* name);

  const unsigned char* image_;
  std::mutex mutex_;
  void* library_ = nullptr;
  std::map<std::string, void*> kernels_;
};

}  // namespace fulgur
