// Makes files that repeat one thing many times, which libFuzzer's own mutations seldom do: such files make a reader
// request much memory. tools/fuzz links this file into every target.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  std::minstd_rand random(seed);
  const auto below = [&](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random); };
  if (size == 0 || size >= max_size || below(4) != 0) return LLVMFuzzerMutate(data, size, max_size);
  const size_t begin = below(size), length = 1 + below(std::min<size_t>(16, size - begin));
  const size_t count = below(1 + (max_size - size) / length);
  const std::string piece(reinterpret_cast<const char*>(data) + begin, length);
  std::move_backward(data + begin, data + size, data + size + count * length);
  for (size_t i = 0; i < count; ++i) std::copy(piece.begin(), piece.end(), data + begin + i * length);
  return size + count * length;
}
