#pragma once

#include <arrow/type_fwd.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fulgur {

// Shuffles the rows by `seed` and cuts them into parts. The same seed gives the same parts on every machine.
//   const auto parts = split_table(*table, {0.8, 0.1, 0.1}, /*seed=*/1);
// Throws UsageError if a fraction is negative or they do not add up to 1.
std::vector<std::shared_ptr<arrow::Table>> split_table(const arrow::Table& table, const std::vector<double>& fractions,
                                                       uint64_t seed);

}  // namespace fulgur
