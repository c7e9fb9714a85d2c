#pragma once

#include <optional>
#include <string>
#include <vector>

#include "fulgur/base/choice.h"
#include "fulgur/base/describe.h"
#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"

namespace fulgur {

// A parameter group of the optimizer that options name. An unset value is the optimizer's own.
struct ParamGroupOptions {
  std::string match{};  // parameters whose whole name matches: * is any text, ? any character, [ab] one of them
  std::string name{};   // what logs and messages call the group
  std::optional<double> lr{}, weight_decay{};
  void describe(FieldVisitor& visit);
};

// What is made for a Module that does not override configure_optimizers: an optimizer by its name and settings, its
// parameter groups, and a schedule.
//   [optimizer]                     [[optimizer.groups]]      [scheduler]
//   type = "AdamW"                  match = "*.bias"          type = "StepLR"
//   lr = 3e-4                       weight_decay = 0.0        step_size = 10
class OptimizerChoice {
 public:
  bool is_none() const { return optimizer_.is("none"); }
  const std::string& name() const { return optimizer_.name(); }

  // Visits the fields optimizer, optimizer.X for each setting X, optimizer.groups; and the same for scheduler, whose
  // settings are those of LRSchedulerConfig, too.
  void describe(FieldVisitor& visit);

  // Throws UsageError if make() would for any Module.
  void check() const;

  // A parameter belongs to the first group that matches its name; those that none matches are a group of their own.
  // Throws UsageError for names, settings and values that do not exist, and for a group that no parameter is in.
  Optimizers make(const Module& module) const;

 private:
  Choice optimizer_{"none"}, scheduler_{"none"};
  std::vector<ParamGroupOptions> groups_{};
};

}  // namespace fulgur
