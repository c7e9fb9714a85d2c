#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/core/record.h"
#include "fulgur/core/run_state.h"

namespace fulgur {

class Module;

// How save_checkpoint() saves a checkpoint.
struct SaveOptions {
  bool weights_only = false;         // for inference or fine-tuning: no run can resume from it
  bool async = false;                // training continues once the state is copied; files are written in the background
  std::vector<std::string> links{};  // links next to the folder, such as "last", that point to the complete checkpoint
};

// What a callback can read from a run and request from it. Valid until the callback's teardown() returns.
class TrainerControl {
 public:
  virtual ~TrainerControl() = default;

  virtual const RunState& state() const = 0;
  virtual MetricLog& metrics() = 0;  // read all metrics, log further ones
  virtual Module& module() = 0;

  // Sends a histogram, a text or an image to the loggers of global rank 0. Within a training batch it is sent only if
  // the metrics of that step are logged (log_every_n_steps); of several records with one name the last one is sent.
  // Nothing is sent during the sanity check or in barebones mode. Errors: core/record.h.
  void log_histogram(std::string_view name, const at::Tensor& values);
  void log_text(std::string_view name, std::string text);
  void log_image(std::string_view name, const at::Tensor& pixels);

  virtual std::string device_summary() const = 0;  // "single_device on cpu, precision 32"
  virtual std::string memory_summary() const = 0;  // a table of the bytes that a rank keeps in fit; empty if not known

  // The optimizers of fit, numbered as configure_optimizers returned them, from on_fit_start to on_fit_end; empty at
  // other times. The learning rates of parameter groups may be read and written, and groups added (add_param_group)
  // between steps: in on_train_epoch_start or in on_train_batch_start of a step's first batch, on every rank.
  virtual const Optimizers& optimizers() = 0;

  // Multiplies the learning rate of a parameter group, now and in all that its schedules give from now on. Every rank
  // calls it, between steps or in accepts_update(), but not within a validation. Throws UsageError if there is no such
  // optimizer or group, or if the factor is not above 0 and finite.
  virtual void scale_lr(size_t optimizer, size_t group, double factor) = 0;

  // Requests that training go back to the newest checkpoint of this run that a run can resume from, or to the one that
  // this run has resumed from. Every rank calls it, in a hook of training, in accepts_update() or in on_validation_end;
  // returns false if there is no such checkpoint. The checkpoint is loaded after the batch, the validation or the epoch
  // has ended with its hooks: weights, buffers, optimizer state, loss scale, averaged weights with the states of the
  // callbacks that average them, and what the Module keeps in checkpoints. Pending gradients are dropped. Everything
  // else continues as if the batches since the checkpoint had been skipped: learning rates, weight decay, schedules,
  // counters, data, requires_grad and other callbacks. A run that was interrupted may go back less far than one that
  // was not: to the checkpoint that was saved at the interruption. Throws UsageError outside of fit. Loading throws
  // CheckpointError if the checkpoint does not fit, for example because a parameter group was added since.
  virtual bool roll_back() = 0;

  // Adds the parameters to a running average: average += share * (parameters - average); the first call copies the
  // parameters. For a callback with averages_weights(). Every rank calls it, between steps.
  virtual void average_weights(double share) = 0;

  // Calls `body` while the module's parameters are those that validations and checkpoints take. Hooks of validations
  // see these parameters anyway. Other hooks of training see the weights that the next forward reads: with a callback
  // that averages_weights() the trained weights instead of their average; with `delayed_update` weights that have a
  // prediction of the update in progress instead of the update itself, except from the end of an epoch to the first
  // batch of the next epoch, when no update is in progress.
  //   Every rank calls it, between steps: in on_train_batch_start, in on_train_batch_end or outside of a batch. With
  // `delayed_update` it waits for the update in progress, copies the parameters twice and, if updates are sharded,
  // gathers them twice. Training is not changed by it. If `body` throws, the parameters stay as `body` saw them.
  void with_evaluated_weights(const std::function<void()>& body);

  // If `shown`, gives the parameters the values that validations and checkpoints take, otherwise the values that
  // training reads. Returns whether the former were shown before. Prefer with_evaluated_weights(), which calls it
  // twice.
  virtual bool show_evaluated(bool shown) = 0;

  virtual int64_t global_rank() const = 0;  // rank of this process over all machines
  virtual int64_t world_size() const = 0;   // number of ranks over all machines
  virtual c10::Device device() const = 0;   // where this process runs its steps; with `dp` the first device
  bool is_global_zero() const { return global_rank() == 0; }  // this rank writes the files

  // The tensors of all ranks, on every rank: shape [world_size, ...], on the device of `tensor`, without a graph.
  // Every rank must call it at the same point, so that a callback with runs_on_every_rank() false must not. Throws
  // c10::ValueError, on every rank, if the tensors differ in shape or type, or if a tensor is undefined.
  virtual at::Tensor all_gather(const at::Tensor& tensor) = 0;

  // The folder for this run's files, the same on every rank: runs/version_N, or runs/<name>, under default_root_dir.
  virtual const std::filesystem::path& run_dir() = 0;

  // fit ends after the running optimizer step, once min_epochs and min_steps are reached. With several ranks, a
  // request of one rank is enough, and the step after the running one may be the last.
  virtual void request_stop(std::string_view reason) = 0;

  virtual int64_t accumulation() const = 0;  // micro-batches per optimizer step

  // Changes accumulation() from the next epoch on; in on_train_epoch_start from this epoch on. Throws UsageError if it
  // is below 1.
  virtual void set_accumulation(int64_t accumulate_grad_batches) = 0;

  // Writes a checkpoint: a new folder that appears complete or not at all. Every rank calls it. If requested in a hook
  // of training or of its validation, the checkpoint is written when the running optimizer step has ended, with its
  // last hook and the validation that follows it (at the end of an epoch: after the epoch's last hook), so that a run
  // that resumes from it does what this run does. on_checkpoint_saved fires when it is complete. Throws
  // CheckpointError.
  virtual void save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options = {}) = 0;

  // Returns `wanted`, or, if that path exists or is about to be written, `wanted` with -v1, -v2, ... appended. Every
  // rank calls it and gets rank 0's answer. Throws CheckpointError, as save_checkpoint() does, after a run of several
  // ranks has failed, because its ranks can no longer save together.
  virtual std::filesystem::path free_checkpoint_path(const std::filesystem::path& wanted) = 0;

  // Returns rank 0's `value` on every rank; every rank calls it. For a value that decides whether all ranks do
  // something, such as save.
  virtual double from_rank_zero(double value) = 0;

  // Removes a checkpoint that fulgur has written, but no other files in its folder, and not the checkpoint that the
  // run resumed from if TrainerOptions::ckpt_path is its path. Does nothing on ranks above 0.
  virtual void remove_checkpoint(const std::filesystem::path& folder) = 0;

 private:
  virtual bool takes_records() const = 0;  // false: records are dropped now
  virtual void send(const Record& record) = 0;
};

// The decision of on_train_batch_start.
enum class BatchAction {
  run,
  skip_epoch,  // neither this batch nor the rest of the epoch is trained on; the epoch ends as usual
};

// Observes a run, and may request actions: logging, checkpoints, an early stop. Hooks are declared in the order in
// which they fire (Lightning's); for each hook the callbacks run in list order, those with runs_last() last, then the
// Module's hook of the same name (at on_train_epoch_end those with runs_last() run after the Module). An exception from
// a hook ends the run: on_exception and teardown fire, then the exception reaches the caller of fit. Threading: the
// training thread only.
class Callback {
 public:
  virtual ~Callback() = default;

  // True for callbacks that judge or save what all others did: EarlyStopping, ModelCheckpoint.
  virtual bool runs_last() const { return false; }

  virtual bool runs_in_fast_dev_run() const { return true; }  // false for callbacks that write files or stop training

  virtual bool runs_on_every_rank() const { return true; }  // false for callbacks that print or write: only rank 0

  // True: when on_before_optimizer_step fires, gradients are those of the mean loss, at the cost of a pass over them.
  virtual bool wants_gradients() const { return false; }

  // True: StepReport::grad_norm is computed for every step, also without clipping, at the cost of a pass over
  // gradients. Like wants_gradients() the same on every rank, so that the callback must run on every rank.
  virtual bool wants_grad_norm() const { return false; }

  // True: accepts_update() is called. Like wants_grad_norm() it costs a pass over gradients, and the loss of each
  // micro-batch, for which the host waits. SetupError for a Module that optimises manually, and for LBFGS.
  virtual bool judges_updates() const { return false; }

  // True: the callback calls average_weights() in fit. Validations and checkpoints take the average then.
  virtual bool averages_weights() const { return false; }

  // True: the callback takes what predict_step returns, in on_predict_batch_end, and Trainer::predict returns nothing,
  // so that the predictions need not fit in memory.
  virtual bool takes_predictions() const { return false; }

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
  // Before an update: the mean loss of its micro-batches over all ranks, and the norm of their mean gradient before it
  // is clipped. If a callback returns false, the update is skipped. Every rank gets the same values, and must give the
  // same answer. Not called for gradients that are not finite at a loss scale, which are skipped anyway.
  virtual bool accepts_update(TrainerControl&, double /*loss*/, double /*grad_norm*/) { return true; }
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

  // For loggers: the metrics of one step (every log_every_n_steps) or of an epoch that ended. `step` is the 0-based
  // number of the last training batch that ended in an optimizer step; for a step of a validation or a test it is the
  // number of the batch, counted over all passes. A metric named "step" replaces it.
  virtual void on_metrics(TrainerControl&, const Metrics&, int64_t /*step*/) {}

  // For loggers: values that are not numbers. A logger ignores the kinds that it cannot show. The hyper-parameters of
  // the Module come after on_fit_start, if it has any, also in a run that resumes. `step` is the 0-based number of the
  // last training batch that ended in an optimizer step.
  virtual void on_record(TrainerControl&, const Record&, int64_t /*step*/) {}

  // Called when a checkpoint is complete and on disk. After an async save the ranks notice this at different steps, so
  // that this hook must make no collective call.
  virtual void on_checkpoint_saved(TrainerControl&, const std::filesystem::path& /*folder*/) {}

  // The state that a checkpoint keeps of this callback; a run that resumes calls load_state() after setup, before
  // on_fit_start. fit also calls state() before a validation, and load_state() with the result if a signal stops that
  // validation or it throws. For a callback that runs on every rank, the state of rank 0 is kept for all ranks.
  //   A checkpoint finds the state by the callback's type and its state_key(): for example changed_fields(options_)
  // (base/describe.h), "monitor=val_loss". Callbacks of one type that have state need different keys. If the type
  // occurs once, in the checkpoint and in the run that resumes, its key may change.
  virtual std::string state_key() const { return {}; }
  virtual State state() const { return {}; }
  virtual void load_state(const State&) {}

  // The exception that ended the run, or a stand-in if it is not a std::exception. The caller of fit gets the
  // original.
  virtual void on_exception(TrainerControl&, const std::exception&) {}
  virtual void teardown(TrainerControl&, EntryPoint) {}
};

}  // namespace fulgur
