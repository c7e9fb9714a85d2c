#pragma once

#include <cstdint>

namespace fulgur {

// Seeds every generator that libtorch draws from (CPU and, where there are any, all CUDA devices), so that weights,
// dropout and torch::rand are the same in every run. Samplers have a seed of their own (data/sampler.h).
void seed_everything(uint64_t seed);

}  // namespace fulgur
