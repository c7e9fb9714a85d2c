#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/core/callback.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/trainer/fit_state.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

class ModelCheckpoint;

// The checkpoint that a run begins with, and the checkpoints that the run writes. Every rank makes the same calls.
class RunCheckpoints final : public LoopEvents {
 public:
  // All references are borrowed. `run_dir` is empty until the run's folder is made.
  RunCheckpoints(LoopContext& context, TrainerControl& control, const TrainerOptions& options,
                 const std::filesystem::path& run_dir);

  // Tells OnExceptionCheckpoint where ModelCheckpoint saves.
  void tell_where_checkpoints_are() const;

  // Finds the checkpoint that `ckpt_path` means, and loads what must be known before the strategy is set up. Throws
  // UsageError if there is none, except that fit starts from scratch where there is no "last" yet.
  void open(const std::string& ckpt_path);

  // Loads the weights of the opened checkpoint, if there is one, into a module that has the precision of the run, and,
  // unless fit resumes, what the Module has saved.
  void load_weights() const;
  State strategy_state() const;              // StrategyState::shared, if fit resumes; otherwise empty
  void estimate_steps(FitLoop& loop) const;  // corrects the loop's estimate, if fit resumes
  void resume(const FitState& fit);          // loads the rest of fit's state, if fit resumes

  int64_t first_step() const { return first_step_; }  // the global_step that fit begins with

  // From now on, checkpoints have the state of `fit`; null: only the weights.
  void set_fit(const FitState* fit) { fit_ = fit; }
  const FitState* fit() const { return fit_; }

  // Whether the strategy holds the weights of the module, so that a checkpoint gets them from it.
  void set_weights_in_strategy(bool value) { weights_in_strategy_ = value; }

  // Members of TrainerControl.
  void save(const std::filesystem::path& folder, const SaveOptions& options);
  std::filesystem::path free_path(const std::filesystem::path& wanted) const;
  void remove(const std::filesystem::path& folder) const;
  bool roll_back();

  // Called by CheckpointSaver.
  void with_content(bool weights_only, const std::function<void(CheckpointContent&)>& use) const;
  void on_saved(const std::filesystem::path& folder, const SaveOptions& options);

  void roll_back_if_asked() override;
  void on_step_boundary() override;
  void interrupt(int signal) override;
  [[noreturn]] void interrupt_after_last_step(int signal) const;
  void abort(const std::string& reason);  // called once, when the run fails
  bool has_failed() const { return has_failed_; }

 private:
  void share_links() const;
  CheckpointContent content(bool weights_only) const;
  NamedTensors weights_to_train(const CheckpointReader& checkpoint) const;
  void log_resume() const;
  void load_data_state() const;
  void tell_where_fit_resumes();
  void check_ranks_can_save(const std::filesystem::path& folder) const;
  ModelCheckpoint* model_checkpoint() const;
  std::vector<std::filesystem::path> folders_to_search() const;
  void requeue() const;
  bool is_fit() const { return context_.state.entry_point == EntryPoint::fit; }

  LoopContext& context_;
  TrainerControl& control_;
  const TrainerOptions& options_;
  const std::filesystem::path& run_dir_;
  const FitState* fit_ = nullptr;
  std::optional<CheckpointReader> opened_;        // the checkpoint that this run begins with
  std::filesystem::path resumed_from_;            // empty: fit starts from scratch, or with weights only
  std::vector<std::filesystem::path> resumable_;  // checkpoints that a run can resume from, the newest last
  std::filesystem::path goes_back_to_;            // the checkpoint that roll_back() has requested; empty: none
  int64_t first_step_ = 0;
  bool names_origin_ = false;     // ckpt_path is the path of resumed_from_, not "last" or a link
  bool origin_was_left_ = false;  // resumed_from_ was saved because a signal or an exception ended its run
  bool weights_in_strategy_ = false;
  bool has_failed_ = false, is_interrupted_ = false;
};

}  // namespace fulgur
