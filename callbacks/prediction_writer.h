#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/base/describe.h"
#include "fulgur/core/callback.h"

namespace fulgur {

struct PredictionWriterOptions {
  std::filesystem::path dirpath{};  // empty: predictions/ in the run's folder
  int64_t part_size_mib = 256;      // a part is written once it is this large
  void describe(FieldVisitor& visit);
};

// Writes what predict_step returns to safetensors files, and lets Trainer::predict keep nothing: memory holds one part.
//   rank0-part00000.safetensors, rank0-part00001.safetensors, ...; for each rank its own
// A part has the tensors of the predictions by their names, joined along dim 0, in the order in which the rank's loader
// gave the batches; 0-dim tensors get a dim 0. Its metadata says dataloader_idx, first_batch and num_batches, rank and
// world_size. A part ends where names, types or the other dims change, and with the loader. With several ranks, rank r
// of n predicts the samples r, r + n, r + 2 n, ... (Loader::set_shard). Errors: the constructor throws UsageError for a
// size below 1; setup throws SetupError if the folder has parts already; CheckpointError if a part cannot be written.
class PredictionWriter final : public Callback {
 public:
  using Options = PredictionWriterOptions;
  explicit PredictionWriter(Options options = {});
  static std::shared_ptr<PredictionWriter> make(Options options = {});

  bool takes_predictions() const override { return true; }
  bool runs_in_fast_dev_run() const override { return false; }
  void setup(TrainerControl& trainer, EntryPoint entry_point) override;
  void on_predict_batch_end(TrainerControl& trainer, const Batch& prediction, const Batch& batch,
                            int64_t batch_idx) override;
  void on_predict_epoch_end(TrainerControl& trainer) override;

  const std::vector<std::filesystem::path>& files() const { return files_; }  // this rank's, from the last predict

 private:
  std::filesystem::path folder(TrainerControl& trainer) const;
  void write(TrainerControl& trainer);

  const Options options_;
  std::vector<Batch> part_{};  // predictions that are not written yet, on the host
  int64_t part_bytes_ = 0, first_batch_ = 0, dataloader_idx_ = 0;
  std::vector<std::filesystem::path> files_{};
};

}  // namespace fulgur
