#include "fulgur/data/tables/split_table.h"

#include <arrow/array/array_primitive.h>
#include <arrow/buffer.h>
#include <arrow/compute/api_vector.h>
#include <arrow/datum.h>
#include <arrow/table.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fulgur/base/error.h"
#include "fulgur/data/sampler.h"
#include "fulgur/data/tables/arrow_result.h"

namespace fulgur {

std::vector<std::shared_ptr<arrow::Table>> split_table(const arrow::Table& table, const std::vector<double>& fractions,
                                                       uint64_t seed) {
  const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
  const bool any_negative = std::ranges::any_of(fractions, [](double fraction) { return !(fraction >= 0); });
  if (any_negative || !(std::abs(sum - 1) < 1e-9)) {
    throw UsageError(
        fmt::format("split_table: fractions must be at least 0 and add up to 1; got {}", fmt::join(fractions, ", ")));
  }
  const at::Tensor order = RandomSampler(table.num_rows(), seed).indices(0);
  std::vector<std::shared_ptr<arrow::Table>> parts;
  int64_t begin = 0;
  double cumulative = 0;
  for (size_t i = 0; i < fractions.size(); ++i) {
    cumulative += fractions[i];
    const bool is_last = i + 1 == fractions.size();  // the sum of all fractions is not quite 1
    const int64_t rounded = std::llround(cumulative * static_cast<double>(table.num_rows()));
    const int64_t end = is_last ? table.num_rows() : std::min(rounded, table.num_rows());
    const arrow::Int64Array rows(
        end - begin, arrow::Buffer::Wrap(order.const_data_ptr<int64_t>() + begin, static_cast<size_t>(end - begin)));
    const arrow::Datum whole(table.Slice(0));
    const auto part = arrow::compute::Take(whole, arrow::Datum(rows.data()));
    parts.push_back(value_of(part, "cannot split the table").table());
    begin = end;
  }
  return parts;
}

}  // namespace fulgur
