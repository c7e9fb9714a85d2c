#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/describe.h"

namespace fulgur {

// One of several things that an option chooses by name, such as a strategy, and the settings of what is chosen:
// --strategy=ddp --strategy.bucket_cap_mib=10. Settings are kept as text until there is an object to set them on. With
// the name "auto" the choice is made later, so that settings of every candidate are accepted.
class Choice {
 public:
  // What can be chosen.
  struct Candidates {
    std::vector<std::string> names;                                        // also those without settings: "none"
    std::function<void(const std::string& name, FieldVisitor&)> describe;  // visits the settings of a candidate, in
                                                                           // an object that lives as long as the call
  };

  explicit Choice(std::string_view name) : name_(name) {}

  const std::string& name() const { return name_; }
  bool is(std::string_view name) const;  // compares by canonical_name()

  // Takes the values of an options struct as settings.
  void take_settings(const DescribeFields& describe);

  // Visits `field`, which is the name, and field.X for each setting X of any candidate.
  void describe(FieldVisitor& visit, const Field& field, const Candidates& candidates);

  // Sets the settings on what was chosen: `describe` visits its fields; `field` and `chosen` are for messages. Throws
  // UsageError for a wrong value, or for a setting that it does not have; the message then names which of `candidates`
  // have it.
  void apply(std::string_view field, std::string_view chosen, const DescribeFields& describe,
             const Candidates& candidates = {}) const;

 private:
  std::string name_;
  std::map<std::string, std::string, std::less<>> settings_{};  // values as text
};

}  // namespace fulgur
