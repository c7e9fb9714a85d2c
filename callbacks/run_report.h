#pragma once

#include <exception>
#include <filesystem>

#include "fulgur/core/callback.h"

namespace fulgur {

// Writes the page of reports/html_report.h to report.html in the run's folder when fit has ended, also if a signal
// ended it. A validate or test that follows in the same folder writes the page again, with its metrics. The Trainer
// adds a RunReport where there is a CSVLogger, unless enable_report is false. A folder without files of a run gets no
// page. Errors: what cannot be read or written is a warning, for the training is done.
class RunReport final : public Callback {
 public:
  bool runs_on_every_rank() const override { return false; }
  bool runs_in_fast_dev_run() const override { return false; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_exception(TrainerControl& trainer, const std::exception& error) override;
  void teardown(TrainerControl& trainer, EntryPoint entry_point) override;  // the other callbacks have written

 private:
  bool has_failed_ = false;
  std::filesystem::path folder_of_fit_{};  // the folder of the last page that fit wrote; empty: there is none
};

}  // namespace fulgur
