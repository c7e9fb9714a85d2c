#pragma once

#include <dlfcn.h>

namespace fulgur {

// Looks a function of the CUDA runtime up in the process, because no header of CUDA is used; null if libtorch came
// without CUDA.
//   auto* const count_devices = cuda_function<int(int*)>("cudaGetDeviceCount");
template <class Function>
Function* cuda_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace fulgur
