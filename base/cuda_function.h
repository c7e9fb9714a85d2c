#pragma once

#include <dlfcn.h>

namespace fulgur {

// A function of the CUDA runtime that libtorch has brought into the process, so that nothing else is linked to it; null
// if libtorch came without CUDA.
//   auto* const count_devices = cuda_function<int(int*)>("cudaGetDeviceCount");
template <class Function>
Function* cuda_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace fulgur
