#pragma once

#include <string_view>

#include "fulgur/base/describe.h"

namespace fulgur {

struct EngineOptions;

// Data parallel in one process: a replica of the model and a thread for each device, each with its part of every
// batch. See Replicas for the requirements on a module: make_module, and a loss that is a mean over its batch.
struct Dp {
  static constexpr std::string_view kName = "dp";
  void describe(FieldVisitor&) {}
  EngineOptions engine_options() const;
};

}  // namespace fulgur
