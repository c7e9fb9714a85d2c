#include "fulgur/base/seed.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

#include "fulgur/base/error.h"

namespace fulgur {

void seed_everything(uint64_t seed) { at::manual_seed(seed); }

RandomState RandomState::now() {
  RandomState now;
  now.add(at::detail::getDefaultCPUGenerator());
  const auto num_gpus = static_cast<c10::DeviceIndex>(at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0);
  for (c10::DeviceIndex i = 0; i < num_gpus; ++i) now.add(at::globalContext().defaultGenerator({c10::kCUDA, i}));
  return now;
}

RandomState RandomState::here() {
  RandomState here;
  here.add(at::detail::getDefaultCPUGenerator());
  if (at::hasCUDA()) {
    here.add(at::globalContext().defaultGenerator(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice()));
  }
  return here;
}

void RandomState::add(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  states_.emplace_back(std::move(generator), state);
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
