#pragma once

// The kernels of update_kernels.cu as a program for GPUs, where fulgur is built with CUDA (FULGUR_HAS_CUDA_KERNELS):
// fulgur_update_adam, _sgd, _adagrad, _rmsprop and _lion, each of which takes an UpdateLaunch of its rule and as many
// blocks of device_code::kThreads threads as that says.
extern "C" const unsigned char fulgur_optim_update_kernels[];
