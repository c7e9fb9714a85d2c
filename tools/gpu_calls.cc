// A library to preload, which counts what a program asks of the CUDA runtime, and prints it at the end:
//   LD_PRELOAD=bazel-bin/tools/libgpu_calls.so program    -> gpu calls: launches 120, copies 4, waits 2, allocations 9
// Launches of libraries with a CUDA runtime of their own, such as cuBLAS, are not among them. The functions are
// declared here, so that it builds without CUDA: https://docs.nvidia.com/cuda/cuda-runtime-api.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace {

struct Dim3 {
  unsigned x, y, z;
};

enum Kind : uint8_t { kLaunch, kCopy, kWait, kAllocation, kNumKinds };
std::atomic<int64_t> counts[kNumKinds];

struct AtExit {
  ~AtExit() {
    std::fprintf(stderr, "gpu calls: launches %ld, copies %ld, waits %ld, allocations %ld\n", counts[kLaunch].load(),
                 counts[kCopy].load(), counts[kWait].load(), counts[kAllocation].load());
  }
} at_exit;

// Counts a call and makes it.
template <class... Args>
int counted(Kind kind, const char* name, Args... args) {
  ++counts[kind];
  return reinterpret_cast<int (*)(Args...)>(dlsym(RTLD_NEXT, name))(args...);
}

}  // namespace

extern "C" {

// Writes the counts so far, in the order of the line at the end, for a program that finds this function by dlsym.
void fulgur_gpu_calls(int64_t* so_far) {
  for (size_t kind = 0; kind < kNumKinds; ++kind) so_far[kind] = counts[kind].load();
}

// What `kernel<<<...>>>` calls in programs of CUDA 13; those of older CUDA call cudaLaunchKernel.
int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return counted(kLaunch, __func__, kernel, grid, block, args, shared, stream);
}
int cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return counted(kLaunch, __func__, function, grid, block, args, shared, stream);
}
int cudaLaunchKernelExC(const void* config, const void* function, void** args) {
  return counted(kLaunch, __func__, config, function, args);
}
int cudaLaunchCooperativeKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared, void* stream) {
  return counted(kLaunch, __func__, function, grid, block, args, shared, stream);
}
int cudaGraphLaunch(void* graph, void* stream) { return counted(kLaunch, __func__, graph, stream); }
int cudaMemsetAsync(void* memory, int value, size_t size, void* stream) {
  return counted(kLaunch, __func__, memory, value, size, stream);
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return counted(kCopy, __func__, to, from, size, kind, stream);
}
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  ++counts[kCopy];
  return counted(kWait, __func__, to, from, size, kind);
}

int cudaStreamSynchronize(void* stream) { return counted(kWait, __func__, stream); }
int cudaEventSynchronize(void* event) { return counted(kWait, __func__, event); }
int cudaDeviceSynchronize() { return counted(kWait, __func__); }

int cudaMalloc(void** memory, size_t size) { return counted(kAllocation, __func__, memory, size); }
int cudaMallocAsync(void** memory, size_t size, void* stream) {
  return counted(kAllocation, __func__, memory, size, stream);
}
int cudaHostAlloc(void** memory, size_t size, unsigned flags) {
  return counted(kAllocation, __func__, memory, size, flags);
}

}  // extern "C"
