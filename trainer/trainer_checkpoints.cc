#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <system_error>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/on_exception_checkpoint.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/remove_checkpoint.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/exchange.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/loops/signal_watch.h"
#include "fulgur/trainer/find_checkpoint.h"
#include "fulgur/trainer/run_dir.h"
#include "fulgur/trainer/trainer.h"

// The part of Trainer that finds checkpoints and writes them.
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

void Trainer::save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options) {
  if (!module_) throw UsageError("save_checkpoint: there is no module yet; call fit, validate, test or predict first");
  check_ranks_go_on(folder);
  if (saver_ != nullptr) return saver_->save(folder, options);
  LocalCollective alone;
  if (rank_ == 0) write_checkpoint(folder, checkpoint_content(/*weights_only=*/true), alone, options.links);
}

void Trainer::check_ranks_go_on(const std::filesystem::path& folder) const {
  if (!failing_ || saver_ == nullptr || world_size_ == 1) return;
  throw CheckpointError(
      fmt::format("'{}' cannot be written: the ranks, which write it together, are ending", folder.string()));
}

std::filesystem::path Trainer::free_checkpoint_path(const std::filesystem::path& wanted) {
  if (world_ == nullptr) throw UsageError("free_checkpoint_path: no run is under way");
  check_ranks_go_on(wanted);
  world_->control().barrier();  // earlier saves are complete; write_checkpoint waits, too
  const auto is_taken = [&](const std::filesystem::path& path) {
    return std::filesystem::symlink_status(path).type() != std::filesystem::file_type::not_found ||
           (saver_ != nullptr && saver_->is_asked_for(path));
  };
  const std::string first = std::filesystem::absolute(wanted).string();
  std::filesystem::path path = first;
  for (int version = 1; rank_ == 0 && is_taken(path); ++version) path = fmt::format("{}-v{}", first, version);
  return all_gather_bytes(world_->control(), path.string()).front();
}

double Trainer::from_rank_zero(double value) {
  if (world_ == nullptr) throw UsageError("from_rank_zero: no run is under way");
  const at::Tensor shared = at::tensor({value}, at::kDouble);
  world_->control().broadcast(shared, /*root=*/0).wait();
  return shared.item<double>();
}

void Trainer::remove_checkpoint(const std::filesystem::path& folder) {
  std::error_code error;
  if (rank_ > 0 || !is_checkpoint(folder)) return;
  if (names_origin_ && std::filesystem::equivalent(folder, resumed_from_, error))
    return;  // the same command may be run again
  try {
    fulgur::remove_checkpoint(folder);
  } catch (const CheckpointError& damaged) {  // by no fault of this run
    log_warning("an old checkpoint stays: {}", damaged.what());
  }
}

CheckpointContent Trainer::checkpoint_content(bool weights_only) {
  CheckpointContent content = weights_of(**module_, running_ ? strategy_->module_state() : named_state(**module_));
  content.run.set_child("hyper_parameters", (*module_)->hyper_parameters());
  const bool is_whole = fit_state_ != nullptr && !weights_only;
  is_whole ? fit_state_->add_to(content) : content.run.set("weights_only", true);
  if (interrupted_ || failing_) content.run.set("ended_early", true);
  return content;
}

// Calls on_checkpoint_saved. A checkpoint that was saved only because a run ended early is removed when `last` points
// to a newer one that a run can resume from.
void Trainer::tell_of_checkpoint(const std::filesystem::path& folder, const SaveOptions& options) {
  hooks_.callbacks_only(hooks::on_checkpoint_saved, &Callback::on_checkpoint_saved, folder);
  const bool has_all = fit_state_ != nullptr && !options.weights_only;
  const bool is_last = has_all && std::ranges::count(options.links, "last") > 0;
  std::error_code error;
  if (!is_last || !origin_was_left_) return;
  if (!std::filesystem::equivalent(folder.parent_path(), resumed_from_.parent_path(), error)) return;
  origin_was_left_ = false;
  remove_checkpoint(resumed_from_);
}

void Trainer::save_at_boundary() {
  for (const auto& callback : callbacks_) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) saving->on_step_boundary(*this);
  }
}

void Trainer::tell_where_checkpoints_are() {
  const ModelCheckpoint* saving = model_checkpoint();
  for (const auto& callback : callbacks_) {
    auto* on_exception = dynamic_cast<OnExceptionCheckpoint*>(callback.get());
    if (on_exception == nullptr) continue;
    on_exception->set_model_checkpoint(saving == nullptr ? std::nullopt : std::optional(saving->dirpath()));
  }
}

// The first ModelCheckpoint of the run; null: there is none.
ModelCheckpoint* Trainer::model_checkpoint() const {
  for (const auto& callback : callbacks_) {
    if (auto* saving = dynamic_cast<ModelCheckpoint*>(callback.get())) return saving;
  }
  return nullptr;
}

// The folders to search for a checkpoint, in this order. Only fit uses a checkpoint of another run.
std::vector<std::filesystem::path> Trainer::folders_of_checkpoints() {
  std::vector<std::filesystem::path> folders;
  const bool is_fit = state_.entry_point == EntryPoint::fit;
  const ModelCheckpoint* saving = model_checkpoint();
  const bool has_folder = saving != nullptr && (is_fit || !saving->dirpath().empty() || !run_dir_.empty());
  if (has_folder) folders.push_back(saving->folder(*this));
  if (!options_.name.empty()) {
    folders.push_back(named_run_dir(options_.default_root_dir, options_.name) / "checkpoints");
  } else if (is_fit) {
    for (const auto& run : run_dirs(options_.default_root_dir)) folders.push_back(run / "checkpoints");
  } else if (!run_dir_.empty()) {
    folders.push_back(run_dir_ / "checkpoints");
  }
  return folders;
}

// Rank 0 searches, so that all ranks read the same checkpoint.
void Trainer::open_checkpoint(const std::string& ckpt_path, DataModule& data) {
  resumed_from_.clear();
  names_origin_ = origin_was_left_ = false;
  const bool is_fit = state_.entry_point == EntryPoint::fit;
  std::string found;
  if (rank_ == 0 && (!ckpt_path.empty() || is_fit)) {
    const auto path = find_checkpoint(ckpt_path, folders_of_checkpoints(), /*is_needed=*/!is_fit);
    if (path) found = path->string();
    if (is_fit && model_checkpoint() != nullptr) remove_left_overs(model_checkpoint()->folder(*this));
    if (is_fit && path && canonical_name(ckpt_path) == "last") remove_left_overs(path->parent_path());
  }
  if (ckpt_path.empty()) return;
  found = all_gather_bytes(world_->control(), found).front();
  if (found.empty()) {
    log_info("there is no checkpoint yet: ckpt_path = '{}' begins anew", ckpt_path);
    return;
  }
  checkpoint_.emplace(found, VerifyOptions{.digests = options_.ckpt_verify});
  if (!is_fit || options_.ckpt_weights_only) {
    if (rank_ == 0) log_info("loaded the weights of '{}'", found);
    return;
  }
  if (!checkpoint_->has_optimizer_state()) {
    throw UsageError(fmt::format(
        "'{}' has weights only, from which no run can go on; set ckpt_weights_only to begin one with them", found));
  }
  resumed_from_ = found;
  names_origin_ = names_itself(ckpt_path);
  origin_was_left_ = checkpoint_->run().find<bool>("ended_early") != nullptr;
  load_requires_grad(hooks_.module(), *checkpoint_);
  data.load_state(checkpoint_->run().child("data"));
  tell_of_resume();
}

// A resumed run has the weights that the checkpointed run had. If that run rounded them to a 16-bit precision and this
// one has another precision, they are the fp32 masters, with a delayed update that was in progress.
NamedTensors Trainer::checkpointed_weights() const {
  if (resumed_from_.empty()) return checkpoint_->finished_weights();
  const Precision before(checkpoint_->run().get<std::string>("strategy/precision"));
  const bool was_rounded = before.is_true_16_bit() && before.name() != precision_.name();
  return was_rounded ? checkpoint_->finished_weights() : checkpoint_->weights();
}

void Trainer::tell_of_resume() const {
  const State& run = checkpoint_->run();
  std::string changed;
  const auto compare = [&](std::string_view what, const auto& before, const auto& now) {
    if (before != now) changed += fmt::format("; {} was {} and is {}", what, before, now);
  };
  compare("strategy", run.get<std::string>("strategy/name"), strategy_->name());
  compare("the number of ranks", run.get<int64_t>("strategy/world_size"), world_size_);
  compare("precision", run.get<std::string>("strategy/precision"), std::string(precision_.name()));
  if (rank_ > 0) return;
  log_info("going on from '{}': epoch {}, step {}{}", checkpoint_->folder().string(), run.get<int64_t>("loops/epoch"),
           run.get<int64_t>("loops/global_step"), changed);
}

// SLURM starts the same command line again, which must lead to the checkpoint.
void Trainer::requeue() const {
  if (canonical_name(options_.ckpt_path) == "last") return requeue_slurm_job();
  log_warning(
      "the job is not queued again: its command line would start over. Queue it with --ckpt_path=last, and with --name "
      "if other runs write into the same folder; then it also queues itself again the next time");
}

void Trainer::interrupt(int signal) {
  const std::string_view name = signal_name(signal);
  std::string message = fmt::format("{} ended the run after {} steps", name, state_.global_step);
  interrupted_ = true;
  if (const ModelCheckpoint* saving = model_checkpoint()) {
    const auto path = free_checkpoint_path(saving->folder(*this) /
                                           fmt::format("epoch={}-step={}-{}", state_.epoch, state_.global_step, name));
    saver_->save(path, {.links = {"last"}});
    saver_->finish();
    message += fmt::format("; ckpt_path = '{}' goes on from there", path.string());
  }
  if (signal == SIGUSR1 && rank_ == 0) requeue();
  throw InterruptedError(message, signal);
}

// The program still has to run the code after fit, so that the SLURM job is queued again.
void Trainer::interrupt_after_last_step(int signal) const {
  if (signal == SIGUSR1 && rank_ == 0) requeue();
  throw InterruptedError(fmt::format("{} came after the last of {} steps", signal_name(signal), state_.global_step),
                         signal);
}

}  // namespace fulgur
