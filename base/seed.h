#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fulgur/base/state.h"

namespace fulgur {

// Seeds every generator that libtorch draws from (CPU and, where there are any, all CUDA devices), so that weights,
// dropout and torch::rand are the same in every run. Samplers have a seed of their own (data/sampler.h).
void seed_everything(uint64_t seed);

// The states of the generators that libtorch draws from.
class RandomState {
 public:
  static RandomState now();
  static RandomState here();  // only of the CPU and of this thread's GPU, which code in this thread uses
  void restore() const;

  State state() const;                       // keyed by device
  explicit RandomState(const State& state);  // generators that `state` lacks stay as they are

 private:
  RandomState() = default;
  void add(at::Generator generator);

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// Restores, in its destructor, the states that the generators had in its constructor.
class ScopedRandomState {
 public:
  ScopedRandomState() : ScopedRandomState(RandomState::now()) {}
  explicit ScopedRandomState(RandomState state) : state_(std::move(state)) {}
  ~ScopedRandomState() { state_.restore(); }
  ScopedRandomState(const ScopedRandomState&) = delete;
  ScopedRandomState& operator=(const ScopedRandomState&) = delete;

 private:
  const RandomState state_;
};

}  // namespace fulgur
