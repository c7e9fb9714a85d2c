#pragma once

#include <string_view>

#include "fulgur/base/describe.h"

namespace fulgur {

struct EngineOptions;

// One process, one device.
struct SingleDevice {
  static constexpr std::string_view kName = "single_device";
  void describe(FieldVisitor&) {}
  EngineOptions engine_options() const;
};

}  // namespace fulgur
