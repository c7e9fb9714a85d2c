#pragma once

#include <arrow/result.h>
#include <arrow/status.h>
#include <fmt/format.h>

#include <stdexcept>
#include <string_view>
#include <utility>

namespace fulgur {

// Throws std::runtime_error, "<what>: <Arrow's message>", for a status that is an error.
inline void check_status(const arrow::Status& status, std::string_view what) {
  if (!status.ok()) throw std::runtime_error(fmt::format("{}: {}", what, status.message()));
}

// The value of a result. Throws as check_status does.
template <class T>
T value_of(arrow::Result<T> result, std::string_view what) {
  check_status(result.status(), what);
  return std::move(result).ValueUnsafe();
}

}  // namespace fulgur
