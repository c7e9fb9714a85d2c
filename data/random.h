#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace fulgur {

// SplitMix64 (Steele, Lea, Flood 2014): a bijection under which neighbouring numbers have unrelated images.
uint64_t mix_bits(uint64_t x);

// The random numbers of one sample: for augmentation, masking, noise. Cheap to make, so that each sample of each epoch
// has one of its own, and gets the same numbers whichever thread reads it, in whichever order, also after a resume.
//   if (random.chance(0.5)) image = image.flip(-1);
// Source: SplitMix64, which passes BigCrush.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits();   // 64 random bits
  double uniform();  // in [0, 1)
  double normal();   // mean 0, standard deviation 1
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  bool chance(double probability) { return uniform() < probability; }
  int64_t below(int64_t limit);  // one of 0, ..., limit - 1, all equally likely; limit >= 1

  // For ATen's functions, as in at::randperm(n, random.generator()). Made at the first call (some microseconds).
  const at::Generator& generator();

 private:
  uint64_t state_;
  at::Generator generator_{};
};

// Makes the Random of each sample of one epoch.
struct SampleRandom {
  uint64_t seed = 0;
  int64_t epoch = 0;

  Random of(int64_t index) const;
};

}  // namespace fulgur
