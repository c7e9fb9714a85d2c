#include "core/seed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "core/error.h"

namespace fulgur {

void seed_everything(uint64_t seed) { at::manual_seed(seed); }

RandomState RandomState::now() {
  RandomState now;
  now.states_.emplace_back(at::detail::getDefaultCPUGenerator(), at::Tensor());
  const auto num_gpus = static_cast<c10::DeviceIndex>(at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0);
  for (c10::DeviceIndex i = 0; i < num_gpus; ++i) {
    now.states_.emplace_back(at::globalContext().defaultGenerator({c10::kCUDA, i}), at::Tensor());
  }
  for (auto& [generator, state] : now.states_) {
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  return now;
}

State RandomState::state() const {
  State state;
  for (const auto& [generator, tensor] : states_) state.set(generator.device().str(), tensor);
  return state;
}

RandomState::RandomState(const State& state) {
  const RandomState current = now();
  for (const auto& [generator, tensor] : current.states_) {
    const at::Tensor* saved = state.find<at::Tensor>(generator.device().str());
    if (saved != nullptr) states_.emplace_back(generator, saved->clone());
  }
}

void RandomState::restore() const {
  for (auto [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace fulgur
