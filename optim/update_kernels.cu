#include "fulgur/optim/update_launch.h"

using namespace fulgur::optim::gpu;

// `blocks` is the number of blocks that a multiprocessor must be able to hold, which bounds the registers of a thread.
// 0: the compiler's choice. Of RMSprop's three states it would keep some in memory to hold four blocks.
#define FULGUR_UPDATE_KERNEL(name, Step, blocks)                                        \
  extern "C" __global__ void __launch_bounds__(fulgur::device_code::kThreads, blocks)   \
      fulgur_update_##name(const __grid_constant__ UpdateLaunch<Step<Scalar>> launch) { \
    update_part(launch, blockIdx.x, threadIdx.x);                                       \
  }

FULGUR_UPDATE_KERNEL(adam, AdamStep, 0)
FULGUR_UPDATE_KERNEL(sgd, SGDStep, 0)
FULGUR_UPDATE_KERNEL(adagrad, AdagradStep, 0)
FULGUR_UPDATE_KERNEL(rmsprop, RMSpropStep, 3)
FULGUR_UPDATE_KERNEL(lion, LionStep, 0)
