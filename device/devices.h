#pragma once

#include <c10/core/Device.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// How many devices, or which ones: `.devices = 4` (the first four), `.devices = {0, 2}` (those two), `.devices =
// "auto"`. Text may be "auto", a count "4", or a list "0,2"; "2," is the list of one.
class Devices {
 public:
  Devices() = default;  // auto
  template <std::integral I>
    requires(!std::same_as<I, bool> && !std::same_as<I, char>)
  Devices(I count) : count_(static_cast<int64_t>(count)) {}                // NOLINT: implicit, as all of these
  Devices(std::initializer_list<int64_t> indices) : indices_(indices) {}   // NOLINT
  Devices(std::vector<int64_t> indices) : indices_(std::move(indices)) {}  // NOLINT
  Devices(std::string_view text);                                          // NOLINT: throws UsageError
  Devices(const std::string& text) : Devices(std::string_view(text)) {}    // NOLINT
  Devices(const char* text) : Devices(std::string_view(text)) {}           // NOLINT

  std::string to_string() const;  // in the form that the constructor takes

  // Both are nullopt for auto.
  const std::optional<int64_t>& count() const { return count_; }
  const std::optional<std::vector<int64_t>>& indices() const { return indices_; }

 private:
  std::optional<int64_t> count_{};
  std::optional<std::vector<int64_t>> indices_{};
};

// Throws UsageError for a count below 1.
void check_devices(const Devices& devices);

// The devices of a run. `accelerator` is "cpu", "cuda", "gpu" (the same) or "auto" (cuda where there is one). Auto
// takes one CPU device, or every CUDA device. CPU devices are ranks or replicas on the same processor, so any number
// exists. Throws UsageError: 0 devices, more than exist, an index twice, no such accelerator here.
std::vector<c10::Device> resolve_devices(std::string_view accelerator, const Devices& devices);

}  // namespace fulgur
