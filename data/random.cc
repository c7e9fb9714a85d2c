#include "fulgur/data/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

namespace fulgur {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio

}  // namespace

uint64_t mix_bits(uint64_t x) {
  x += kStep;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t Random::bits() {
  const uint64_t result = mix_bits(state_);
  state_ += kStep;
  return result;
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

// Box and Muller 1958.
double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

// Lemire 2019, arXiv:1805.10941: the high word of a product, drawn again where some results would be more likely.
int64_t Random::below(int64_t limit) {
  TORCH_CHECK_VALUE(limit >= 1, "Random::below(", limit, "): there is no number to choose");
  __extension__ using Wide = unsigned __int128;
  const auto n = static_cast<uint64_t>(limit);
  const uint64_t least = -n % n;
  Wide product = Wide{bits()} * n;
  while (static_cast<uint64_t>(product) < least) product = Wide{bits()} * n;
  return static_cast<int64_t>(product >> 64);
}

const at::Generator& Random::generator() {
  if (!generator_.defined()) generator_ = at::make_generator<at::CPUGeneratorImpl>(bits());
  return generator_;
}

Random SampleRandom::of(int64_t index) const {
  const uint64_t of_epoch = mix_bits(seed + mix_bits(static_cast<uint64_t>(epoch)));
  return Random(mix_bits(of_epoch + mix_bits(static_cast<uint64_t>(index))));
}

}  // namespace fulgur
