#include "fulgur/trainer/run_checkpoints.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/on_exception_checkpoint.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/load_weights.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/remove_checkpoint.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/trainer/find_checkpoint.h"
#include "fulgur/trainer/run_dir.h"

namespace fulgur {
namespace {

// Removes what killed saves have left in the folder. A folder that cannot be read is not this run's.
void remove_left_overs(const std::filesystem::path& folder) {
  try {
    remove_temporary_folders(folder);
  } catch (const std::exception&) {
  }
}

// Whether the path is the folder of a checkpoint, and neither "last" nor a link.
bool names_itself(std::filesystem::path ckpt_path) {
  if (!ckpt_path.has_filename()) ckpt_path = ckpt_path.parent_path();  // "a/" becomes "a"
  return is_checkpoint(ckpt_path) && !std::filesystem::is_symlink(ckpt_path);
}

}  // namespace

RunCheckpoints::RunCheckpoints(LoopContext& context, TrainerControl& control, const TrainerOptions& options,
                               const std::filesystem::path& run_dir)
    : context_(context), control_(control), options_(options), run_dir_(run_dir) {}

// Teardown may still save weights when the saver is closed: rank 0 writes them by itself.
void RunCheckpoints::save(const std::filesystem::path& folder, const SaveOptions& options) {
  check_ranks_can_save(folder);
  if (!context_.saver.is_closed()) return context_.saver.save(folder, options);
  LocalCollective alone;
  if (context_.ranks.rank() > 0) return;
  const CheckpointContent weights = content(/*weights_only=*/true);
  write_checkpoint(folder, weights, alone, options.links);
}

void RunCheckpoints::check_ranks_can_save(const std::filesystem::path& folder) const {
  if (!has_failed_ || context_.saver.is_closed() || context_.ranks.world_size() == 1) return;
  throw CheckpointError(
      fmt::format("'{}' cannot be written: the ranks, which write it together, are ending", folder.string()));
}

std::filesystem::path RunCheckpoints::free_path(const std::filesystem::path& wanted) const {
  check_ranks_can_save(wanted);
  context_.world.control().barrier();  // earlier saves are complete; write_checkpoint waits, too
  const auto is_taken = [&](const std::filesystem::path& path) {
    return std::filesystem::symlink_status(path).type() != std::filesystem::file_type::not_found ||
           context_.saver.is_asked_for(path);
  };
  const std::string first = std::filesystem::absolute(wanted).string();
  std::filesystem::path path = first;
  for (int version = 1; context_.ranks.rank() == 0 && is_taken(path); ++version) {
    path = fmt::format("{}-v{}", first, version);
  }
  return all_gather_bytes(context_.world.control(), path.string()).front();
}

void RunCheckpoints::remove(const std::filesystem::path& folder) const {
  std::error_code error;
  if (context_.ranks.rank() > 0 || !is_checkpoint(folder)) return;
  if (names_origin_ && std::filesystem::equivalent(folder, resumed_from_, error))
    return;  // the same command may be run again
  try {
    remove_checkpoint(folder);
  } catch (const CheckpointError& damaged) {  // by no fault of this run
    log_warning("an old checkpoint stays: {}", damaged.what());
  }
}

// A checkpoint has the weights with all updates, or their average if there is one. After an exception the weights of
// training are not shown again, because other ranks may not take part.
void RunCheckpoints::with_content(bool weights_only, const std::function<void(CheckpointContent&)>& use) const {
  const bool was_shown = context_.strategy.show_evaluated(true);
  FirstError error;
  error.run([&] {
    CheckpointContent now = content(weights_only);
    use(now);
  });
  const bool goes_back = error.get() == nullptr || context_.ranks.world_size() == 1;
  if (!was_shown && goes_back) error.run([&] { context_.strategy.show_evaluated(false); });
  error.rethrow();
}

CheckpointContent RunCheckpoints::content(bool weights_only) const {
  Module& module = context_.hooks.module();
  NamedTensors weights = weights_in_strategy_ ? context_.strategy.module_state() : named_state(module);
  CheckpointContent content = context_.hooks.located("on_save_checkpoint", HookCaller::WhatRuns::run,
                                                     [&] { return content_of(module, std::move(weights)); });
  content.run.set_child("data", context_.data.state());
  const bool is_whole = fit_ != nullptr && !weights_only;
  is_whole ? fit_->add_to(content) : content.run.set("weights_only", true);
  if (is_interrupted_ || has_failed_) content.run.set("ended_early", true);
  return content;
}

// Calls on_checkpoint_saved. A checkpoint that was saved only because a run ended early is removed when `last` points
// to a newer one that a run can resume from.
void RunCheckpoints::on_saved(const std::filesystem::path& folder, const SaveOptions& options) {
  context_.hooks.callbacks_only(hooks::on_checkpoint_saved, &Callback::on_checkpoint_saved, folder);
  const bool has_all = fit_ != nullptr && !options.weights_only;
  const bool is_last = has_all && std::ranges::count(options.links, "last") > 0;
  if (has_all) resumable_.push_back(folder);
  std::error_code error;
  if (!is_last || !origin_was_left_) return;
  if (!std::filesystem::equivalent(folder.parent_path(), resumed_from_.parent_path(), error)) return;
  origin_was_left_ = false;
  remove(resumed_from_);
}

// Waits for a checkpoint that is being written in the background, so that the result does not depend on the disk.
bool RunCheckpoints::roll_back() {
  context_.saver.end_writing();
  const bool is_first = context_.ranks.rank() == 0;
  while (is_first && !resumable_.empty() && !is_checkpoint(resumable_.back())) resumable_.pop_back();  // it was removed
  goes_back_to_ =
      all_gather_bytes(context_.world.control(), is_first && !resumable_.empty() ? resumable_.back().string() : "")
          .front();
  return !goes_back_to_.empty();
}

void RunCheckpoints::roll_back_if_asked() {
  if (goes_back_to_.empty()) return;
  const trace::Span span("roll back");
  const CheckpointReader checkpoint(std::exchange(goes_back_to_, {}), {.digests = options_.ckpt_verify});
  context_.strategy.drain();
  fulgur::load_weights(context_.hooks.module(), weights_to_train(checkpoint), checkpoint.folder().string(),
                       options_.ckpt_strict);
  fit_->roll_back(checkpoint);
  for (const auto& callback : context_.hooks.callbacks()) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) saving->forget(context_.state.global_step);
  }
  if (context_.ranks.rank() > 0) return;
  const auto step = checkpoint.run().get<int64_t>("loops/global_step");
  log_info("training has gone back to '{}', which was saved after step {}", checkpoint.folder().string(), step);
}

void RunCheckpoints::on_step_boundary() {
  for (const auto& callback : context_.hooks.callbacks()) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) saving->on_step_boundary(control_);
  }
}

// Where several ModelCheckpoints share a folder, the first one with a monitor sets the link `best`, and those that save
// whole states set `last`.
void RunCheckpoints::share_links() const {
  std::map<std::filesystem::path, bool> has_best, has_whole;  // by folder; empty: the run's
  std::vector<ModelCheckpoint*> all;
  for (const auto& callback : context_.hooks.callbacks()) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) all.push_back(saving);
  }
  for (const ModelCheckpoint* saving : all) has_whole[saving->dirpath()] |= !saving->options().save_weights_only;
  for (ModelCheckpoint* saving : all) {
    const bool is_whole = !saving->options().save_weights_only;
    const bool is_first = !saving->options().monitor.empty() && !std::exchange(has_best[saving->dirpath()], true);
    saving->set_links({.last = is_whole || !has_whole[saving->dirpath()], .best = is_first});
  }
}

void RunCheckpoints::tell_where_checkpoints_are() const {
  share_links();
  const ModelCheckpoint* saving = model_checkpoint();
  for (const auto& callback : context_.hooks.callbacks()) {
    auto* on_exception = dynamic_cast<OnExceptionCheckpoint*>(callback.get());
    if (on_exception == nullptr) continue;
    on_exception->set_model_checkpoint(saving == nullptr ? std::nullopt : std::optional(saving->dirpath()));
  }
}

// The first ModelCheckpoint of the run; null: there is none.
ModelCheckpoint* RunCheckpoints::model_checkpoint() const {
  for (const auto& callback : context_.hooks.callbacks()) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) return saving;
  }
  return nullptr;
}

// The folders to search for a checkpoint, in this order. Only fit uses a checkpoint of another run.
std::vector<std::filesystem::path> RunCheckpoints::folders_to_search() const {
  std::vector<std::filesystem::path> folders;
  const ModelCheckpoint* saving = model_checkpoint();
  const bool has_folder = saving != nullptr && (is_fit() || !saving->dirpath().empty() || !run_dir_.empty());
  if (has_folder) folders.push_back(saving->folder(control_));
  if (!options_.name.empty()) {
    folders.push_back(named_run_dir(options_.default_root_dir, options_.name) / "checkpoints");
  } else if (is_fit()) {
    for (auto& folder : checkpoint_folders_of_runs(options_.default_root_dir)) folders.push_back(std::move(folder));
  } else if (!run_dir_.empty()) {
    folders.push_back(run_dir_ / "checkpoints");
  }
  return folders;
}

// Rank 0 searches, so that all ranks read the same checkpoint.
void RunCheckpoints::open(const std::string& ckpt_path) {
  const bool is_first = context_.ranks.rank() == 0;
  std::string found;
  if (is_first && (!ckpt_path.empty() || is_fit())) {
    const auto path = find_checkpoint(ckpt_path, folders_to_search(), /*is_needed=*/!is_fit());
    if (path) found = path->string();
    if (is_fit() && model_checkpoint() != nullptr) remove_left_overs(model_checkpoint()->folder(control_));
    if (is_fit() && path && canonical_name(ckpt_path) == "last") remove_left_overs(path->parent_path());
  }
  if (ckpt_path.empty()) return;
  found = all_gather_bytes(context_.world.control(), found).front();
  if (found.empty()) {
    log_warning("no checkpoint found for ckpt_path = '{}'; starting from scratch", ckpt_path);
    return;
  }
  opened_.emplace(found, VerifyOptions{.digests = options_.ckpt_verify});
  if (!is_fit()) load_data_state();
  if (!is_fit() || options_.ckpt_weights_only) return;
  if (!opened_->has_optimizer_state()) {
    throw UsageError(fmt::format(
        "'{}' has weights only, so that no run can resume from it; set ckpt_weights_only to start a run with them",
        found));
  }
  resumed_from_ = found;
  resumable_ = {resumed_from_};
  names_origin_ = names_itself(ckpt_path);
  origin_was_left_ = opened_->run().find<bool>("ended_early") != nullptr;
  tell_where_fit_resumes();
  load_requires_grad(context_.hooks.module(), *opened_, /*tells=*/context_.ranks.rank() == 0);
  context_.data.load_state(opened_->run().child("data"));
  log_resume();
}

// Hooks that run before fit's state is loaded, such as train_dataloader, read the epoch and the step.
void RunCheckpoints::tell_where_fit_resumes() {
  RunState& state = context_.state;
  state.epoch = opened_->run().get<int64_t>("loops/epoch");
  first_step_ = state.global_step = opened_->run().get<int64_t>("loops/global_step");
}

// What the data module has learnt in training, such as the means of columns. A checkpoint without it is that of a run
// with other data, or has weights only.
void RunCheckpoints::load_data_state() const {
  const State saved = opened_->run().child("data");
  if (!saved.empty()) context_.data.load_state(saved);
}

// Training resumes from the weights of the run that saved the checkpoint. If that run rounded its weights to a 16-bit
// precision and this run has another precision, takes the fp32 masters, with a delayed update that was in progress.
NamedTensors RunCheckpoints::weights_to_train(const CheckpointReader& checkpoint) const {
  const Precision before(checkpoint.run().get<std::string>("strategy/precision"));
  const bool was_rounded = before.is_true_16_bit() && before.name() != context_.precision.name();
  return was_rounded ? checkpoint.finished_weights() : checkpoint.weights();
}

void RunCheckpoints::load_weights() const {
  if (!opened_) return;
  const NamedTensors weights = resumed_from_.empty() ? opened_->finished_weights() : weights_to_train(*opened_);
  Module& module = context_.hooks.module();
  fulgur::load_weights(module, weights, opened_->folder().string(), options_.ckpt_strict);
  if (!resumed_from_.empty()) return;  // FitState loads the rest
  if (const State own = opened_->run().child("module"); !own.empty()) {
    name_folder_in_errors(*opened_, [&] {
      context_.hooks.located("on_load_checkpoint", HookCaller::WhatRuns::run, [&] { module.on_load_checkpoint(own); });
    });
  }
  if (context_.ranks.rank() == 0) log_info("loaded the weights of '{}'", opened_->folder().string());
}

State RunCheckpoints::strategy_state() const {
  return resumed_from_.empty() ? State() : opened_->run().child("strategy/state");
}

void RunCheckpoints::estimate_steps(FitLoop& loop) const {
  if (!resumed_from_.empty()) fulgur::estimate_steps(loop, *opened_);
}

void RunCheckpoints::resume(const FitState& fit) {
  if (!resumed_from_.empty()) fit.load(*opened_);
  opened_.reset();  // files that are mapped take room on the disk after they are removed
}

void RunCheckpoints::log_resume() const {
  const State& run = opened_->run();
  std::string changed;
  const auto compare = [&](std::string_view what, const auto& before, const auto& now) {
    if (before != now) changed += fmt::format("; {} was {} and is {}", what, before, now);
  };
  compare("strategy", run.get<std::string>("strategy/name"), context_.strategy.name());
  compare("the number of ranks", run.get<int64_t>("strategy/world_size"), context_.ranks.world_size());
  compare("precision", run.get<std::string>("strategy/precision"), std::string(context_.precision.name()));
  if (context_.ranks.rank() > 0) return;
  log_info("resumes from '{}': epoch {}, step {}{}", opened_->folder().string(), run.get<int64_t>("loops/epoch"),
           run.get<int64_t>("loops/global_step"), changed);
}

// SLURM starts the same command line again, which must lead to the checkpoint.
void RunCheckpoints::requeue() const {
  if (canonical_name(options_.ckpt_path) == "last") return requeue_slurm_job();
  log_warning(
      "the job is not queued again: its command line would start over. Queue it with --ckpt_path=last, and with --name "
      "if other runs write into the same folder; then it also queues itself again the next time");
}

void RunCheckpoints::interrupt(int signal) {
  const std::string_view name = signal_name(signal);
  const RunState& state = context_.state;
  std::string message = fmt::format("{} ended the run after {} steps", name, state.global_step);
  is_interrupted_ = true;
  if (const ModelCheckpoint* saving = model_checkpoint()) {
    const auto path =
        free_path(saving->folder(control_) / fmt::format("epoch={}-step={}-{}", state.epoch, state.global_step, name));
    context_.saver.save(path, {.links = {"last"}});
    context_.saver.finish();
    message += fmt::format("; to resume, set ckpt_path = '{}'", path.string());
  }
  context_.strategy.drain();
  if (signal == SIGUSR1 && context_.ranks.rank() == 0) requeue();
  throw InterruptedError(message, signal);
}

// The SLURM job is queued again, because the program still has to run the code after fit.
void RunCheckpoints::interrupt_after_last_step(int signal) const {
  if (signal == SIGUSR1 && context_.ranks.rank() == 0) requeue();
  throw InterruptedError(
      fmt::format("{} came after the last of {} steps", signal_name(signal), context_.state.global_step), signal);
}

void RunCheckpoints::abort(const std::string& reason) {
  has_failed_ = true;
  context_.saver.abort(reason);
}

}  // namespace fulgur
