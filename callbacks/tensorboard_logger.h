#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/callbacks/appended_file.h"
#include "fulgur/core/callback.h"

namespace fulgur {

// Writes metrics, histograms, texts, images and hyper-parameters to an event file in the run's folder:
// `tensorboard --logdir runs` shows all runs. Besides the metrics the epoch is a scalar. Scalars are rounded to fp32.
//   A run that resumes begins a further file; what its folder has beyond the checkpoint is cut off, and a TensorBoard
// that is open is told to drop it, so that every step is there once. Another run in the same folder writes to v1/, v2/,
// ... in it. If the disk is full, one warning is logged and records are left out.
class TensorBoardLogger final : public Callback {
 public:
  static std::shared_ptr<TensorBoardLogger> make() { return std::make_shared<TensorBoardLogger>(); }

  bool runs_on_every_rank() const override { return false; }
  bool runs_in_fast_dev_run() const override { return false; }
  // Throws SetupError if the files of a run that resumes cannot be cut.
  void on_metrics(TrainerControl& trainer, const Metrics& metrics, int64_t step) override;
  void on_record(TrainerControl& trainer, const Record& record, int64_t step) override;
  void teardown(TrainerControl& trainer, EntryPoint entry_point) override;
  State state() const override;
  void load_state(const State& state) override;

 private:
  void open(TrainerControl& trainer, double time);
  void choose_folder(const std::filesystem::path& run_dir);
  void cut_to_checkpoint(const std::filesystem::path& folder) const;
  void write(TrainerControl& trainer, int64_t step, double time, const std::string& event);

  struct Written {
    std::string name;
    int64_t num_bytes;
  };

  AppendedFile file_{"TensorBoardLogger"};
  std::filesystem::path run_dir_{};  // the folder of the run for which a file was opened last; empty: none was
  std::string subfolder_{};          // in the run's folder; empty: the run's folder itself
  std::vector<Written> earlier_{};   // what earlier processes of this run had written when the checkpoint was saved
  int64_t next_step_ = 0;            // beyond all steps that were written
  bool is_new_ = true;               // no file has been written yet
};

}  // namespace fulgur
