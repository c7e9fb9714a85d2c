#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/trace.h"

namespace fulgur {

// The sums of a profile as text for other ranks, and back.
std::string sums_to_text(const trace::Profile::Sums& sums);
trace::Profile::Sums sums_from_text(std::string_view text);

// A table of what took how long: calls, mean and total time (means over ranks), share of the row `whole`, and, with
// several ranks, the rank that took longest and how many times the mean that is. The longest come first; rows whose
// share is below `least_share` are left out. `by_rank` is not empty.
std::string profile_table(const std::vector<trace::Profile::Sums>& by_rank, std::string_view whole, double least_share);

}  // namespace fulgur
