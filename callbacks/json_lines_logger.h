#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "fulgur/base/describe.h"
#include "fulgur/base/state.h"
#include "fulgur/callbacks/appended_file.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct JsonLinesLoggerOptions {
  std::string filename = "metrics.jsonl";  // in the run's folder
  void describe(FieldVisitor& visit);
};

// Writes every set of metrics as one line of JSON (https://jsonlines.org):
//   {"epoch": 0, "step": 49, "time": 1767225600.125, "metrics": {"train_loss": 0.25}}
// `time` is in seconds since 1970. Histograms, texts and hyper-parameters are lines of their own, with `histogram` (the
// limits and counts of buckets), `text` or `hyper_parameters` instead of `metrics`; images are left out. NaN is
// null, and infinity is 1e999, which readers take for infinity.
//   A run that resumes continues the file in its folder, after the lines that the file had when the checkpoint was
// saved. Another run in the same folder, or a run that resumes from a checkpoint of another folder, writes
// metrics-v1.jsonl. If the disk is full, one warning is logged and lines are left out. Throws UsageError if `filename`
// cannot be the name of a file.
class JsonLinesLogger final : public Callback {
 public:
  using Options = JsonLinesLoggerOptions;
  explicit JsonLinesLogger(Options options = {});
  static std::shared_ptr<JsonLinesLogger> make(Options options = {});

  bool runs_on_every_rank() const override { return false; }
  bool runs_in_fast_dev_run() const override { return false; }
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override;
  void on_record(TrainerControl& trainer, const Record& record, int64_t step) override;
  void teardown(TrainerControl& trainer, EntryPoint entry_point) override;
  std::string state_key() const override { return changed_fields(options_); }
  State state() const override { return file_.state(); }
  void load_state(const State& state) override { file_.load_state(state); }

  const std::filesystem::path& file() const { return file_.path(); }  // empty before the first line

 private:
  void write(TrainerControl& trainer, int64_t step, const std::string& content);

  const Options options_;
  AppendedFile file_{"JsonLinesLogger"};
};

}  // namespace fulgur
