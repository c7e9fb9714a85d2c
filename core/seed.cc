#include "core/seed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace fulgur {

void seed_everything(uint64_t seed) { at::manual_seed(seed); }

RandomStateRestored::RandomStateRestored() {
  states_.emplace_back(at::detail::getDefaultCPUGenerator(), at::Tensor());
  const auto num_gpus = static_cast<c10::DeviceIndex>(at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0);
  for (c10::DeviceIndex i = 0; i < num_gpus; ++i) {
    states_.emplace_back(at::globalContext().defaultGenerator({c10::kCUDA, i}), at::Tensor());
  }
  for (auto& [generator, state] : states_) state = generator.get_state();
}

RandomStateRestored::~RandomStateRestored() {
  for (auto& [generator, state] : states_) generator.set_state(state);
}

}  // namespace fulgur
