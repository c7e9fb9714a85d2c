#pragma once

// The kernels of norm_kernels.cu as a program for GPUs, where fulgur is built with CUDA (FULGUR_HAS_CUDA_KERNELS):
// fulgur_norm, which takes a gpu::NormLaunch, and fulgur_clip, which takes a gpu::ClipLaunch and one block.
extern "C" const unsigned char fulgur_core_norm_kernels[];
