#pragma once

#include <fmt/format.h>

#include <string_view>

#include "fulgur/base/error.h"

namespace fulgur {

// Throws UsageError if a setting that has no effect differs from its default.
template <class Options, class Value>
void check_unset(std::string_view strategy, std::string_view name, const Options& options, Value Options::* setting,
                 std::string_view because) {
  const Value unset = Options().*setting;
  if (options.*setting == unset) return;
  throw UsageError(fmt::format("strategy '{}': {} = {} would have no effect with {}; leave it at {}", strategy, name,
                               options.*setting, because, unset));
}

}  // namespace fulgur
