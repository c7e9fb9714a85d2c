#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/trace.h"

namespace fulgur {

// The sums of a profile as text for other ranks, and back.
std::string sums_to_text(const trace::Profile::Sums& sums);
trace::Profile::Sums sums_from_text(std::string_view text);

// A table of how long each action took: calls, mean and total time (means over ranks), share of the row `whole`, and,
// with several ranks, the slowest rank with its time as a multiple of the mean. The longest actions come first; rows
// whose share is below `least_share` are left out. `by_rank` is not empty.
std::string profile_table(const std::vector<trace::Profile::Sums>& by_rank, std::string_view whole, double least_share);

}  // namespace fulgur
