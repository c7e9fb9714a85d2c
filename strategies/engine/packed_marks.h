#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fulgur {

// Packs one mark per parameter ("this rank has a gradient for it") into numbers that ranks add up by an all_reduce; the
// sums tell how many ranks have set each mark. A mark takes as many bits as the count of all ranks needs, and a number
// holds several marks: 12 with 2 or 3 ranks, 3 with 64. A number is whole and stays below 2^24, also as a sum, so that
// fp32 holds it exactly and the order of additions does not matter.
std::vector<double> pack_marks(const std::vector<bool>& marks, int64_t world_size);

// How many ranks have set each of `num_marks` marks. `sums` are the numbers that pack_marks() has returned, added over
// ranks.
std::vector<double> unpack_counts(std::span<const double> sums, size_t num_marks, int64_t world_size);

// How many numbers pack_marks() returns. There must be fewer than 2^24 ranks.
size_t num_packed(size_t num_marks, int64_t world_size);

}  // namespace fulgur
