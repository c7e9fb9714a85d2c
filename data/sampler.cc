#include "fulgur/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>

#include "fulgur/data/random.h"

namespace fulgur {
namespace {

at::Generator generator_of(uint64_t seed, int64_t epoch) {
  return at::make_generator<at::CPUGeneratorImpl>(mix_bits(seed + mix_bits(static_cast<uint64_t>(epoch))));
}

}  // namespace

at::Tensor SequentialSampler::indices(int64_t) const { return at::arange(size_, at::kLong); }

at::Tensor RandomSampler::indices(int64_t epoch) const {
  return at::randperm(size_, generator_of(seed_, epoch), at::kLong);
}

}  // namespace fulgur
