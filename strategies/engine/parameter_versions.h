#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

// Notices that code other than the engine has written to a parameter, by the version that autograd counts for it. The
// engine itself writes to the buckets, whose versions are others.
class ParameterVersions {
 public:
  void remember(const FlatParameters& parameters);
  void remember(const FlatParameters& parameters, size_t bucket);
  void remember_new(const FlatParameters& parameters);  // remembers the buckets that were appended

  // The name of a parameter of the bucket that was written to since remember(); null if there is none, or the bucket
  // was not there yet.
  const std::string* written(const FlatParameters& parameters, size_t bucket) const;

  // Warns, the first time, that what was written to this parameter is lost.
  void warn_of_lost_write(const std::string& name);

 private:
  std::vector<std::vector<int64_t>> versions_{};  // by bucket and slot
  bool has_said_ = false;
};

}  // namespace fulgur
