#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/metric_log.h"
#include "core/optimizer.h"
#include "core/run_state.h"
#include "core/state.h"

namespace fulgur {

class Module;

struct SaveOptions {
  bool weights_only = false;  // for inference or fine-tuning: no run can go on from it
  bool async = false;         // training goes on once the state is copied; the rest is written beside it
  std::vector<std::string>
      links{};  // names beside the folder, such as "last", that are to point to it once it is there
};

// What a callback may see of a run and ask of it.
class TrainerControl {
 public:
  virtual ~TrainerControl() = default;

  virtual const RunState& state() const = 0;
  virtual MetricLog& metrics() = 0;  // read all metrics, log further ones
  virtual Module& module() = 0;
  virtual std::string device_summary() const = 0;  // "single_device on cpu"
  virtual std::string memory_summary() const = 0;  // a table of what a rank keeps, in fit; empty if it is not known

  // The optimizers of fit, numbered as configure_optimizers returned them, from on_fit_start to on_fit_end; none at
  // other times. Learning rates of their groups may be read and written, and groups added (add_param_group) between
  // steps: in on_train_epoch_start or in on_train_batch_start of a step's first batch, on every rank.
  virtual const Optimizers& optimizers() = 0;

  virtual int64_t global_rank() const = 0;  // this process among those that train together
  virtual int64_t world_size() const = 0;   // how many train together
  virtual c10::Device device() const = 0;   // where this process runs its steps; with `dp` the first device
  bool is_global_zero() const { return global_rank() == 0; }  // rank 0 of all: the one that writes files

  // Every rank's tensor, on every rank: of shape [world_size, ...], on the device of `tensor`, without a graph. Every
  // rank must call it at the same place, and so no callback with runs_on_every_rank() false. Throws c10::ValueError, on
  // every rank, if the tensors differ in shape or type, or if one is undefined.
  virtual at::Tensor all_gather(const at::Tensor& tensor) = 0;

  // The folder of this run's files, runs/version_N under default_root_dir, on every rank; made at the first call.
  virtual const std::filesystem::path& run_dir() = 0;

  // fit ends after the running optimizer step, once min_epochs and min_steps are reached. With several ranks it is
  // enough that one asks, and the step after that may be the last.
  virtual void request_stop(std::string_view reason) = 0;

  virtual int64_t accumulation() const = 0;  // micro-batches to an optimizer step

  // Changes it, from the next epoch on, or in on_train_epoch_start from this one on. Throws UsageError if less than 1.
  virtual void set_accumulation(int64_t accumulate_grad_batches) = 0;

  // Writes a checkpoint: a new folder that appears whole or not at all. Every rank calls it. Asked for in a hook of
  // training or of its validation, it is written when the running optimizer step has ended, with its last hook and the
  // validation that it brings (at the end of an epoch: after the epoch's last hook), so that a run that goes on from it
  // does what this one does. on_checkpoint_saved says when it is there. Throws CheckpointError.
  virtual void save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options = {}) = 0;

  // `wanted`, or if something is there or about to be there, that with -v1, -v2, ... behind it. Rank 0 looks, for every
  // rank: each calls it. Throws CheckpointError where save_checkpoint would because the ranks are ending.
  virtual std::filesystem::path free_checkpoint_path(const std::filesystem::path& wanted) = 0;

  // Rank 0's, on every rank: each calls it. For what decides whether all of them do something, such as save.
  virtual double from_rank_zero(double value) = 0;

  // Removes one that fulgur has written, and nothing else that lies in its folder; not the one that the run resumed
  // from if TrainerOptions::ckpt_path is its path. Only rank 0 does something.
  virtual void remove_checkpoint(const std::filesystem::path& folder) = 0;
};

// What on_train_batch_start decides.
enum class BatchAction {
  run,
  skip_epoch,  // neither this batch nor the rest of the epoch is trained on; the epoch ends as usual
};

// Something that observes a run, and may ask for things: logging, checkpoints, an early stop. Hooks stand here in the
// order in which they fire (Lightning's); for each hook the callbacks come in list order, ModelCheckpoint last, then
// the Module's hook of the same name (at on_train_epoch_end ModelCheckpoint comes after the Module). An exception from
// a hook ends the run: on_exception and teardown fire, then it goes to the caller of fit. Threading: the training
// thread only.
class Callback {
 public:
  virtual ~Callback() = default;

  virtual bool runs_last() const { return false; }  // true for ModelCheckpoint: what it saves must be complete
  virtual bool runs_in_fast_dev_run() const { return true; }  // false for what leaves files or stops training

  virtual bool runs_on_every_rank() const { return true; }  // false for what shows or writes: once for all ranks

  // True: gradients are those of the mean loss when on_before_optimizer_step fires, at the price of a pass over them.
  virtual bool wants_gradients() const { return false; }

  virtual void setup(TrainerControl&, EntryPoint) {}

  virtual void on_fit_start(TrainerControl&) {}
  virtual void on_sanity_check_start(TrainerControl&) {}
  virtual void on_sanity_check_end(TrainerControl&) {}
  virtual void on_train_start(TrainerControl&) {}
  virtual void on_train_epoch_start(TrainerControl&) {}
  virtual BatchAction on_train_batch_start(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {
    return BatchAction::run;
  }
  virtual void on_before_zero_grad(TrainerControl&) {}
  virtual void on_before_backward(TrainerControl&, const at::Tensor& /*loss*/) {}
  virtual void on_after_backward(TrainerControl&) {}
  virtual void on_before_optimizer_step(TrainerControl&, Optimizer&) {}
  virtual void on_train_batch_end(TrainerControl&, const at::Tensor& /*loss, detached; undefined if skipped*/,
                                  const Batch&, int64_t /*batch_idx*/) {}

  virtual void on_validation_start(TrainerControl&) {}
  virtual void on_validation_epoch_start(TrainerControl&) {}
  virtual void on_validation_batch_start(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_validation_batch_end(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_validation_epoch_end(TrainerControl&) {}
  virtual void on_validation_end(TrainerControl&) {}

  virtual void on_train_epoch_end(TrainerControl&) {}
  virtual void on_train_end(TrainerControl&) {}
  virtual void on_fit_end(TrainerControl&) {}

  virtual void on_test_start(TrainerControl&) {}
  virtual void on_test_epoch_start(TrainerControl&) {}
  virtual void on_test_batch_start(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_test_batch_end(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_test_epoch_end(TrainerControl&) {}
  virtual void on_test_end(TrainerControl&) {}

  virtual void on_predict_start(TrainerControl&) {}
  virtual void on_predict_epoch_start(TrainerControl&) {}
  virtual void on_predict_batch_start(TrainerControl&, const Batch&, int64_t /*batch_idx*/) {}
  virtual void on_predict_batch_end(TrainerControl&, const Batch& /*prediction*/, const Batch&, int64_t /*batch_idx*/) {
  }
  virtual void on_predict_epoch_end(TrainerControl&) {}
  virtual void on_predict_end(TrainerControl&) {}

  // Loggers: values of one step (every log_every_n_steps) or of an epoch that ended. `step` counts from 0 the training
  // batches that ended in an optimizer step.
  virtual void on_metrics(TrainerControl&, const Metrics&, int64_t /*step*/) {}

  // A checkpoint is whole and on disk.
  virtual void on_checkpoint_saved(TrainerControl&, const std::filesystem::path& /*folder*/) {}

  // What it keeps for a run that goes on from a checkpoint; load_state comes after setup, before on_fit_start. Of a
  // callback that runs on every rank, rank 0's is kept for all.
  virtual State state() const { return {}; }
  virtual void load_state(const State&) {}

  // What was thrown; a stand-in for what is not a std::exception. The caller of fit gets it as it is.
  virtual void on_exception(TrainerControl&, const std::exception&) {}
  virtual void teardown(TrainerControl&, EntryPoint) {}
};

}  // namespace fulgur
