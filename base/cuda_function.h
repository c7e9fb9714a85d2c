#pragma once

#include <dlfcn.h>

namespace fulgur {

// Looks up a function of the CUDA runtime that libtorch has loaded into the process, so that fulgur need not link to
// CUDA. Null if libtorch came without CUDA.
//   auto* const count_devices = cuda_function<int(int*)>("cudaGetDeviceCount");
template <class Function>
Function* cuda_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace fulgur
