#pragma once

#include <iosfwd>
#include <memory>

#include "fulgur/core/callback.h"

namespace fulgur {

struct ModelSummaryOptions {
  std::ostream* out = nullptr;  // null: stdout
};

// Prints, at the start of fit, the strategy with its devices and precision, the module's children with their numbers of
// parameters (a tied parameter counts once in the totals), the memory that a rank keeps, and the steps with their
// samples.
class ModelSummary final : public Callback {
 public:
  using Options = ModelSummaryOptions;
  explicit ModelSummary(Options options = {});
  static std::shared_ptr<ModelSummary> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }

  void on_fit_start(TrainerControl& trainer) override;

 private:
  Options options_;
};

}  // namespace fulgur
