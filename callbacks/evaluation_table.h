#pragma once

#include <iosfwd>
#include <memory>

#include "fulgur/core/callback.h"

namespace fulgur {

struct EvaluationTableOptions {
  std::ostream* out = nullptr;  // null: stdout
};

// Prints the metrics of Trainer::validate and Trainer::test as a table, with all digits of a float.
class EvaluationTable final : public Callback {
 public:
  using Options = EvaluationTableOptions;
  explicit EvaluationTable(Options options = {});
  static std::shared_ptr<EvaluationTable> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }

  void on_validation_end(TrainerControl& trainer) override;
  void on_test_end(TrainerControl& trainer) override;

 private:
  void print(TrainerControl& trainer) const;

  Options options_;
};

}  // namespace fulgur
