#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct KinetoProfilerOptions {
  int64_t wait_batches = 5;    // training batches of a fit that are left alone: the first ones allocate memory
  int64_t warmup_batches = 2;  // training batches during which the profiler is being prepared
  int64_t active_batches = 3;  // training batches that are recorded, with what runs between them
  int64_t table_rows = 20;

  void describe(FieldVisitor& visit);
};

// Records some batches of a fit by torch's profiler, operator by operator, and on a GPU kernel by kernel, once for each
// fit. Each rank writes trace-rank<r>.json to the run's folder, for chrome://tracing or ui.perfetto.dev, with fulgur's
// own spans around the operators. Rank 0 prints a table of the operators that took longest by themselves, and writes it
// to trace-rank0.txt. A later fit in the same folder writes trace-rank0-v1.json and trace-rank0-v1.txt. On the CPU, the
// training thread and the threads of backward are recorded. --profiler=kineto adds this callback. A process records one
// fit at a time.
// Errors: the constructor throws UsageError for numbers out of range. If fit ends early, the batches that were recorded
// so far are written, or a warning is logged if there are none.
class KinetoProfiler final : public Callback {
 public:
  using Options = KinetoProfilerOptions;

  explicit KinetoProfiler(Options options = {});
  static std::shared_ptr<KinetoProfiler> make(Options options = {});
  ~KinetoProfiler() override;

  bool runs_in_fast_dev_run() const override { return false; }
  void on_train_start(TrainerControl& trainer) override;
  BatchAction on_train_batch_start(TrainerControl& trainer, const Batch& batch, int64_t batch_idx) override;
  void on_train_batch_end(TrainerControl& trainer, const at::Tensor& loss, const Batch& batch,
                          int64_t batch_idx) override;
  void on_train_end(TrainerControl& trainer) override;
  void teardown(TrainerControl& trainer, EntryPoint entry_point) override;

 private:
  class Recording;
  void write(TrainerControl& trainer);

  const Options options_;
  int64_t num_batches_ = 0;  // number of training batches of this fit that have ended
  bool has_written_ = false;
  std::unique_ptr<Recording> recording_;  // null: not recording
};

}  // namespace fulgur
