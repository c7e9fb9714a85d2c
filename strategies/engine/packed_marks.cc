#include "fulgur/strategies/engine/packed_marks.h"

#include <c10/util/Exception.h>

#include <bit>

namespace fulgur {
namespace {

constexpr int64_t kBitsOfNumber = 24;

// Where a mark lies in a number.
struct Fields {
  explicit Fields(int64_t world_size) : bits(std::bit_width(static_cast<uint64_t>(world_size))) {
    TORCH_INTERNAL_ASSERT(bits <= kBitsOfNumber);
  }

  size_t per_number() const { return static_cast<size_t>(kBitsOfNumber / bits); }
  int64_t shift(size_t mark) const { return static_cast<int64_t>(mark % per_number()) * bits; }

  int64_t bits;  // for one mark
};

}  // namespace

size_t num_packed(size_t num_marks, int64_t world_size) {
  const size_t per_number = Fields(world_size).per_number();
  return (num_marks + per_number - 1) / per_number;
}

std::vector<double> pack_marks(const std::vector<bool>& marks, int64_t world_size) {
  const Fields fields(world_size);
  std::vector<double> numbers(num_packed(marks.size(), world_size), 0.0);
  for (size_t i = 0; i < marks.size(); ++i) {
    if (marks[i]) numbers[i / fields.per_number()] += static_cast<double>(int64_t{1} << fields.shift(i));
  }
  return numbers;
}

std::vector<double> unpack_counts(std::span<const double> sums, size_t num_marks, int64_t world_size) {
  const Fields fields(world_size);
  const int64_t mask = (int64_t{1} << fields.bits) - 1;
  std::vector<double> counts;
  for (size_t i = 0; i < num_marks; ++i) {
    const auto number = static_cast<int64_t>(sums[i / fields.per_number()]);
    counts.push_back(static_cast<double>(number >> fields.shift(i) & mask));
  }
  return counts;
}

}  // namespace fulgur
