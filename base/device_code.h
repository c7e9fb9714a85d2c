#pragma once

#include <cstdint>
#include <cstring>

// The building blocks of kernels for GPUs. A kernel's body is a function of its argument, the block and the thread.
// nvcc compiles the function for the GPU (tools/cuda.bzl); the host's compiler compiles it for tests, which call it in
// loops over blocks and threads. Therefore kernels include no header of torch, and use only operations that both
// compilers round alike.
#ifdef __CUDACC__
#define FULGUR_DEVICE_CODE __host__ __device__ __forceinline__
#define FULGUR_DEVICE_UNROLL _Pragma("unroll 4")  // before a loop of loads: runs four loads at once
#else
#define FULGUR_DEVICE_CODE inline
#define FULGUR_DEVICE_UNROLL
#endif

namespace fulgur::device_code {

constexpr uint32_t kThreads = 256;           // threads of a block in every kernel
constexpr size_t kMaxArgumentBytes = 32764;  // the limit from compute capability 7.0 and CUDA 12.1 on

enum class Format : uint8_t { none, fp32, bf16, fp16 };

template <class To, class From>
FULGUR_DEVICE_CODE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

FULGUR_DEVICE_CODE float float_of(uint32_t bits) { return bits_as<float>(bits); }

FULGUR_DEVICE_CODE float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

FULGUR_DEVICE_CODE float from_fp16(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffU) << 13, exponent = magnitude & (0x7c00U << 13);
  uint32_t bits = magnitude + ((127U - 15U) << 23);
  if (exponent == 0x7c00U << 13) bits += (128U - 16U) << 23;                                        // infinity or NaN
  if (exponent == 0) bits = bits_as<uint32_t>(float_of(bits + (1U << 23)) - float_of(113U << 23));  // exact: subnormal
  return float_of(bits | (half & 0x8000U) << 16);
}

// Rounded to nearest even; a NaN stays one.
FULGUR_DEVICE_CODE uint16_t to_bf16(float value) {
  const auto bits = bits_as<uint32_t>(value);
  const uint32_t rounded = value != value ? bits | 0x400000U : bits + 0x7fffU + (bits >> 16 & 1U);
  return static_cast<uint16_t>(rounded >> 16);
}

// Rounded to nearest even; a NaN stays one.
FULGUR_DEVICE_CODE uint16_t to_fp16(float value) {
  const auto bits = bits_as<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t half = (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
  if (magnitude < 113U << 23) {             // 0.5, whose last place is half's smallest subnormal, does the rounding
    constexpr uint32_t kHalf = 126U << 23;  // bits of 0.5
    half = bits_as<uint32_t>(float_of(magnitude) + float_of(kHalf)) - kHalf;
  }
  if (magnitude >= 143U << 23) half = 0x7c00U;  // 65536 and more
  if (magnitude > 0x7f800000U) half = (magnitude & 0x7fffffU) >> 13 | 0x7e00U;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000U));
}

// Numbers that are read or written by one instruction. Their address is a multiple of their size.
template <class Number, int kCount>
struct alignas(sizeof(Number) * kCount) Packed {
  Number at[kCount];
};

template <int kCount, class Number>
FULGUR_DEVICE_CODE Packed<Number, kCount> packed(const void* numbers, int64_t first) {
  return *reinterpret_cast<const Packed<Number, kCount>*>(static_cast<const Number*>(numbers) + first);
}

// Reads numbers of any format.
template <int kCount>
FULGUR_DEVICE_CODE void load(const void* numbers, Format format, int64_t first, float* to) {
  if (format == Format::fp32) {
    const auto from = packed<kCount, float>(numbers, first);
    for (int i = 0; i < kCount; ++i) to[i] = from.at[i];
  } else {
    const auto from = packed<kCount, uint16_t>(numbers, first);
    for (int i = 0; i < kCount; ++i) to[i] = format == Format::bf16 ? from_bf16(from.at[i]) : from_fp16(from.at[i]);
  }
}

// Writes numbers in any format but `none`.
template <int kCount>
FULGUR_DEVICE_CODE void store(void* numbers, Format format, int64_t first, const float* from) {
  if (format == Format::fp32) {
    Packed<float, kCount> to;
    for (int i = 0; i < kCount; ++i) to.at[i] = from[i];
    *reinterpret_cast<Packed<float, kCount>*>(static_cast<float*>(numbers) + first) = to;
  } else {
    Packed<uint16_t, kCount> to;
    for (int i = 0; i < kCount; ++i) to.at[i] = format == Format::bf16 ? to_bf16(from[i]) : to_fp16(from[i]);
    *reinterpret_cast<Packed<uint16_t, kCount>*>(static_cast<uint16_t*>(numbers) + first) = to;
  }
}

// The numbers that a thread reads at once.
constexpr int kWidth = 4;

// Whether kWidth numbers from a multiple of kWidth on may be read at once.
inline bool is_aligned(const void* numbers, Format format) {
  const uintptr_t bytes = format == Format::none ? 1 : format == Format::fp32 ? kWidth * 4 : kWidth * 2;
  return reinterpret_cast<uintptr_t>(numbers) % bytes == 0;
}

// Finds the row that has a block. A kernel works on a table with a row for each tensor, which is cut into blocks.
template <class Row>
FULGUR_DEVICE_CODE const Row& row_of_block(const Row* rows, uint32_t num_rows, uint32_t block) {
  uint32_t low = 0, high = num_rows - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (rows[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return rows[low];
}

}  // namespace fulgur::device_code
