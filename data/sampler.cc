#include "fulgur/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>

namespace fulgur {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): neighbouring seeds and epochs give unrelated streams.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

at::Tensor SequentialSampler::indices(int64_t) const { return at::arange(size_, at::kLong); }

at::Tensor RandomSampler::indices(int64_t epoch) const {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(mix(seed_ + mix(static_cast<uint64_t>(epoch))));
  return at::randperm(size_, generator, at::kLong);
}

}  // namespace fulgur
