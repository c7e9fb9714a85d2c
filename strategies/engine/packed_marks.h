#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fulgur {

// The marks of a rank, in numbers whose sums over ranks tell how many ranks have set each mark. A number has as many
// bits for a mark as the count of all ranks takes, and room for several marks: 12 with 2 or 3 ranks, 3 with 64. It is
// whole and stays below 2^24, also as a sum, so that fp32 holds it and any order of additions gives the same.
std::vector<double> pack_marks(const std::vector<bool>& marks, int64_t world_size);

// How many ranks have set each of `num_marks` marks. `sums` are the numbers that pack_marks() has returned, added over
// ranks.
std::vector<double> unpack_counts(std::span<const double> sums, size_t num_marks, int64_t world_size);

// How many numbers pack_marks() returns. There must be fewer than 2^24 ranks.
size_t num_packed(size_t num_marks, int64_t world_size);

}  // namespace fulgur
