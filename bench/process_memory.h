#pragma once

#include <string_view>

namespace fulgur::bench {

// MB that this process has now, and at most so far or since forget_peak(), of pages in memory (RSS); and its share of
// what is in memory now, where pages that several processes map are divided by their number (PSS).
double resident_mb();
double peak_mb();
double proportional_mb();

// Begins a new peak. Without the kernel's support the peak stays that of the whole run.
void forget_peak();

}  // namespace fulgur::bench
