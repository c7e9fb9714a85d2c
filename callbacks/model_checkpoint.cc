#include "fulgur/callbacks/model_checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iterator>
#include <limits>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/callbacks/monitored.h"
#include "fulgur/checkpoint/file_system.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The values for fields of a filename: epoch and step, which are integers, and all metrics.
struct FilenameValues {
  int64_t epoch, step;
  const Metrics* metrics;       // null: 0.0 for each name, to test a pattern
  bool nan_if_unknown = false;  // otherwise a metric that was not logged is an error
};

std::string format_value(std::string_view spec, const std::string& name, const FilenameValues& values) {
  const std::string braced = fmt::format("{{{}}}", spec);
  const auto pattern = fmt::runtime(braced);
  if (name == "epoch") return fmt::format(pattern, values.epoch);
  if (name == "step") return fmt::format(pattern, values.step);
  if (values.metrics == nullptr) return fmt::format(pattern, 0.0);
  if (const auto value = values.metrics->find(name); value != values.metrics->end())
    return fmt::format(pattern, value->second);
  if (values.nan_if_unknown) return fmt::format(pattern, kNan);
  std::vector<std::string> known = values.metrics->names();
  known.insert(known.end(), {"epoch", "step"});
  throw SetupError("ModelCheckpoint: " + unknown_name_message("filename field", name, known));
}

// "epoch=3", "val_acc=0.981"; a '/' in a name would make a folder, so it becomes '_'.
std::string format_field(std::string_view field, const FilenameValues& values) {
  const size_t colon = std::min(field.find(':'), field.size());
  const std::string name(field.substr(0, colon));
  std::string label = name;
  std::ranges::replace(label, '/', '_');
  try {
    return fmt::format("{}={}", label, format_value(field.substr(colon), name, values));
  } catch (const fmt::format_error& error) {
    throw UsageError(
        fmt::format("ModelCheckpoint: filename has '{{{}}}', which is no format of a number: {}; write it as in "
                    "{{epoch:02d}} or {{val_loss:.2f}}",
                    field, error.what()));
  }
}

std::string format_filename(std::string_view pattern, const FilenameValues& values) {
  std::string name;
  while (!pattern.empty()) {
    const size_t open = std::min(pattern.find('{'), pattern.size());
    name += pattern.substr(0, open);
    pattern.remove_prefix(open);
    if (pattern.empty()) break;
    const size_t close = pattern.find('}');
    if (close == std::string_view::npos) {
      throw UsageError(fmt::format("ModelCheckpoint: filename has a '{{' without '}}' at '{}'", pattern));
    }
    name += format_field(pattern.substr(1, close - 1), values);
    pattern.remove_prefix(close + 1);
  }
  return name;
}

// Checks that the name is that of a direct child of the folder, whatever the values of its fields.
void check_filename(const std::string& pattern) {
  const std::string name = format_filename(pattern, {.epoch = 0, .step = 0, .metrics = nullptr});
  if (!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos) return;
  throw UsageError(
      fmt::format("ModelCheckpoint: filename = '{}' is to be the name of a folder, without '/' and '..'; write the "
                  "folder that it is to be in as dirpath",
                  pattern));
}

// Throws UsageError before training starts instead of CheckpointError at the first save.
void make_writable(const fs::path& dirpath) {
  try {
    make_folders(dirpath);
  } catch (const CheckpointError& error) {
    throw UsageError(fmt::format("ModelCheckpoint: dirpath: {}", error.what()));
  }
  if (::access(dirpath.c_str(), W_OK) == 0) return;
  throw UsageError(fmt::format("ModelCheckpoint: dirpath: no file can be written into '{}': {}", dirpath.string(),
                               std::generic_category().message(errno)));
}

}  // namespace

void ModelCheckpointOptions::describe(FieldVisitor& visit) {
  visit({.name = "dirpath", .help = "folder of the checkpoints; empty: checkpoints/ in the run's folder"}, &dirpath);
  visit({.name = "filename", .help = "pattern of a checkpoint's name"}, &filename);
  visit({.name = "monitor", .help = "metric that ranks the checkpoints"}, &monitor);
  visit({.name = "mode", .help = "which value of the monitor is better", .choices = {"min", "max"}}, &mode);
  visit({.name = "save_top_k", .help = "how many of the best checkpoints to keep; -1: all", .min = -1}, &save_top_k);
  visit({.name = "every_n_epochs", .help = "epochs from one save to the next", .min = 1}, &every_n_epochs);
  visit(
      {.name = "every_n_train_steps", .help = "optimizer steps from one save to the next; 0: save by epochs", .min = 0},
      &every_n_train_steps);
  visit({.name = "save_weights_only", .help = "save only the weights, from which no run can resume"},
        &save_weights_only);
  visit({.name = "async", .help = "write checkpoints in the background"}, &async);
}

ModelCheckpoint::ModelCheckpoint(Options options) : options_(std::move(options)) {
  check_fields("ModelCheckpoint", options_);
  check_filename(options_.filename);
  options_.mode = canonical_name(options_.mode);
  if (options_.filename == "last" || options_.filename == "best") {
    throw UsageError(
        fmt::format("ModelCheckpoint: filename = '{}' is the name of a link that points to a checkpoint; "
                    "choose another",
                    options_.filename));
  }
  if (options_.every_n_train_steps > 0 && options_.every_n_epochs != 1) {
    throw UsageError(
        fmt::format("ModelCheckpoint: every_n_epochs = {} and every_n_train_steps = {} contradict each other: it saves "
                    "either by epochs or by steps; leave one of them out",
                    options_.every_n_epochs, options_.every_n_train_steps));
  }
  if (options_.monitor.empty() && options_.save_top_k > 1) {
    throw UsageError(
        fmt::format("ModelCheckpoint: save_top_k = {} needs a monitor that tells which are best; set it, or "
                    "save_top_k to 1 (the newest) or -1 (all)",
                    options_.save_top_k));
  }
}

std::shared_ptr<ModelCheckpoint> ModelCheckpoint::make(Options options) {
  return std::make_shared<ModelCheckpoint>(std::move(options));
}

void ModelCheckpoint::setup(TrainerControl& trainer, EntryPoint entry_point) {
  if (entry_point != EntryPoint::fit) return;
  folder_ = folder(trainer);
  if (!options_.dirpath.empty() && trainer.is_global_zero()) make_writable(folder_);
  saved_.clear();
  validated_ = just_validated_ = due_ = is_over_ = has_warned_of_nan_ = false;
  last_step_ = scored_step_ = validated_step_ = epoch_ = -1;
  validated_metrics_.clear();
}

void ModelCheckpoint::on_train_start(TrainerControl& trainer) {
  batch_ended_at_ = trainer.state().global_step;
  if (options_.save_top_k != 0) warn_if_never_validated(trainer, "ModelCheckpoint", options_.monitor);
}

void ModelCheckpoint::on_train_epoch_start(TrainerControl& trainer) { epoch_ = trainer.state().epoch; }

void ModelCheckpoint::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const int64_t step = trainer.state().global_step, every = options_.every_n_train_steps;
  const int64_t before = std::exchange(batch_ended_at_, step);  // a batch may take several steps, or none
  if (every == 0 || step / every == before / every || step == last_step_) return;
  last_step_ = step;
  due_ = true;
}

void ModelCheckpoint::on_validation_end(TrainerControl& trainer) {
  if (trainer.state().sanity_checking) return;
  validated_ = just_validated_ = true;
}

void ModelCheckpoint::on_step_boundary(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  if (std::exchange(just_validated_, false)) {
    note_validation(trainer);
    const bool has_score = scored_step_ == state.global_step;
    const bool saves_here = saves_in(state.epoch) && !state.is_last_batch;  // the end of the epoch saves for itself
    due_ = due_ || (saves_here && (has_score || options_.monitor.empty()));
  }
  if (due_) save(trainer, metrics_now(trainer));
}

void ModelCheckpoint::note_validation(TrainerControl& trainer) {
  validated_step_ = trainer.state().global_step;
  validated_metrics_.clear();
  for (const auto& [name, value] : trainer.metrics().callback_metrics()) {
    if (trainer.metrics().was_reduced(name)) validated_metrics_[name] = value;
  }
  if (options_.monitor.empty()) return;
  const bool is_known = trainer.from_rank_zero(validated_metrics_.contains(options_.monitor) ? 1.0 : 0.0) > 0.0;
  if (is_known) scored_step_ = validated_step_;
}

void ModelCheckpoint::on_train_epoch_end(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  const bool validated = std::exchange(validated_, false);
  const bool is_due = saves_in(state.epoch) && (validated || !state.has_validation);
  if (is_due && state.global_step != last_step_) save(trainer, metrics_now(trainer));
}

void ModelCheckpoint::on_train_end(TrainerControl& trainer) {
  const int64_t step = trainer.state().global_step;
  if (step == 0 || (step == last_step_ && !due_)) return;
  is_over_ = true;
  save(trainer, metrics_now(trainer));
}

// Whether every_n_epochs selects the epoch.
bool ModelCheckpoint::saves_in(int64_t epoch) const {
  return options_.every_n_train_steps == 0 && (epoch + 1) % options_.every_n_epochs == 0;
}

// Whether a metric that is not known may still be one that a validation will log, or would have logged.
bool ModelCheckpoint::may_lack_metrics(TrainerControl& trainer) const {
  return is_over_ || (trainer.state().has_validation && validated_step_ < 0);
}

// What a validation measured on older weights is NaN, unless training has logged another value by the same name.
Metrics ModelCheckpoint::metrics_now(TrainerControl& trainer) const {
  Metrics metrics = trainer.metrics().callback_metrics();
  const bool is_validated = validated_step_ == trainer.state().global_step;
  for (auto& [name, value] : metrics) {
    const auto old = validated_metrics_.find(name);
    if (!is_validated && old != validated_metrics_.end() && old->second == value) value = kNan;
  }
  if (scored_step_ >= 0 && scored_step_ != trainer.state().global_step) metrics[options_.monitor] = kNan;
  if (may_lack_metrics(trainer)) metrics.try_emplace(options_.monitor, kNan);
  return metrics;
}

void ModelCheckpoint::save(TrainerControl& trainer, const Metrics& metrics) {
  due_ = false;
  last_step_ = trainer.state().global_step;
  if (options_.save_top_k == 0) return;
  const double new_score = score_of(trainer, metrics);
  const Saved saved{path_for(trainer, metrics), new_score, false};
  std::erase_if(saved_,
                [&](const Saved& other) { return other.path == saved.path; });  // the folder was removed meanwhile
  const auto place = std::ranges::find_if(saved_, [&](const Saved& s) { return better(new_score, s.score); });
  const bool is_best = place == saved_.begin() && is_ranked(saved);
  saved_.insert(place, saved);
  SaveOptions how{.weights_only = options_.save_weights_only, .async = options_.async, .links = {}};
  if (links_.last) how.links.emplace_back("last");
  if (links_.best && is_best && !options_.monitor.empty()) how.links.emplace_back("best");
  trainer.save_checkpoint(saved.path, how);
}

// Keeps the newest checkpoint of this callback and the best of the complete ones, and removes the others.
void ModelCheckpoint::on_checkpoint_saved(TrainerControl& trainer, const fs::path& folder) {
  const auto newest = std::ranges::find(saved_, folder, &Saved::path);
  if (newest == saved_.end()) return;
  newest->whole = true;
  if (options_.save_top_k < 0) return;
  std::vector<Saved> kept, surplus;
  int64_t num_best = 0;
  for (const Saved& saved : saved_) {
    const bool is_best = saved.whole && is_ranked(saved) && num_best++ < options_.save_top_k;
    (is_best || !saved.whole || saved.path == folder ? kept : surplus).push_back(saved);
  }
  saved_ = std::move(kept);
  for (const Saved& saved : surplus) trainer.remove_checkpoint(saved.path);
}

State ModelCheckpoint::state() const {
  State state;
  state.set("validated", validated_);
  state.set("just_validated", just_validated_);
  state.set("due", due_);
  state.set("last_step", last_step_);
  state.set("scored_step", scored_step_);
  state.set("validated_step", validated_step_);
  for (const auto& [name, value] : validated_metrics_) state.set("validated_metrics/" + name, value);
  state.set("monitor", options_.monitor);
  state.set("mode", options_.mode);
  state.set("num_saved", static_cast<int64_t>(saved_.size()));
  for (size_t i = 0; i < saved_.size(); ++i) {
    state.set(fmt::format("saved/{}/name", i), saved_[i].path.filename().string());
    state.set(fmt::format("saved/{}/score", i), saved_[i].score);
  }
  return state;
}

void ModelCheckpoint::forget(int64_t step) {
  for (int64_t* of : {&scored_step_, &validated_step_}) {
    if (*of == step) *of = step - 1;
  }
  last_step_ = -1;
  just_validated_ = false;
}

// Keeps the checkpoints that still exist in the folder of this run, which may be a copy or a continuation of another
// run; if a validation was cut short, also those that are being written. Scores of another monitor are dropped.
void ModelCheckpoint::load_state(const State& state) {
  validated_ = state.get<bool>("validated");
  last_step_ = state.get<int64_t>("last_step");
  const auto is_set = [&](std::string_view name) {  // an older state lacks these values
    const auto* value = state.find<bool>(name);
    return value != nullptr && *value;
  };
  just_validated_ = is_set("just_validated");
  due_ = is_set("due");
  const auto is_as_now = [&](std::string_view what, const std::string& now) {
    const auto* before = state.find<std::string>(what);
    return before == nullptr || *before == now;
  };
  const bool same_scores = is_as_now("monitor", options_.monitor) && is_as_now("mode", options_.mode);
  const auto* scored_step = state.find<int64_t>("scored_step");
  scored_step_ = scored_step != nullptr && same_scores ? *scored_step : -1;
  if (const auto* step = state.find<int64_t>("validated_step")) validated_step_ = *step;
  validated_metrics_.clear();
  const State validated = state.child("validated_metrics");
  for (const auto& [name, value] : validated.values()) validated_metrics_[name] = validated.get<double>(name);
  const std::vector<Saved> before = std::exchange(saved_, {});
  for (int64_t i = 0; i < state.get<int64_t>("num_saved"); ++i) {
    const std::optional<fs::path> path = path_of_saved(state.child(fmt::format("saved/{}", i)));
    const auto score = state.get<double>(fmt::format("saved/{}/score", i));
    if (!path) continue;
    const bool whole = fs::exists(*path);
    if (whole || std::ranges::count(before, *path, &Saved::path) > 0) {
      saved_.push_back({*path, same_scores ? score : kNan, whole});
    }
  }
}

// Older states have the full path of each checkpoint.
std::optional<fs::path> ModelCheckpoint::path_of_saved(const State& saved) const {
  if (const auto* name = saved.find<std::string>("name")) return folder_ / fs::path(*name).filename();
  const fs::path path = saved.get<std::string>("path");
  std::error_code error;
  const bool is_ours = fs::equivalent(path.parent_path(), folder_, error);
  return is_ours ? std::optional(folder_ / path.filename()) : std::nullopt;
}

fs::path ModelCheckpoint::folder(TrainerControl& trainer) const {
  return fs::absolute(options_.dirpath.empty() ? trainer.run_dir() / "checkpoints" : options_.dirpath);
}

bool ModelCheckpoint::better(double a, double b) const {
  if (options_.monitor.empty()) return true;  // the newer one comes first
  if (std::isnan(a) || std::isnan(b)) return std::isnan(b) && !std::isnan(a);
  return options_.mode == "min" ? a < b : a > b;
}

// A checkpoint can be the best if it has a score, or if there is no monitor.
bool ModelCheckpoint::is_ranked(const Saved& saved) const {
  return options_.monitor.empty() || !std::isnan(saved.score);
}

double ModelCheckpoint::score_of(TrainerControl& trainer, const Metrics& metrics) {
  if (options_.monitor.empty()) return kNan;
  const auto metric = metrics.find(options_.monitor);
  if (metric == metrics.end()) {
    throw_unknown_monitor(trainer, "ModelCheckpoint", options_.monitor, metrics);
  }
  const double score = trainer.from_rank_zero(metric->second);
  const bool is_logged = scored_step_ < 0 && trainer.metrics().callback_metrics().contains(options_.monitor);
  const bool is_measured = is_logged || scored_step_ == trainer.state().global_step;
  if (std::isnan(score) && is_measured && trainer.is_global_zero() && !std::exchange(has_warned_of_nan_, true)) {
    log_warning("ModelCheckpoint: the monitor '{}' is NaN at step {}; no checkpoint is marked as best by it",
                options_.monitor, trainer.state().global_step);
  }
  return score;
}

fs::path ModelCheckpoint::path_for(TrainerControl& trainer, const Metrics& metrics) const {
  const RunState& state = trainer.state();
  const int64_t epoch = is_over_ && epoch_ >= 0 ? epoch_ : state.epoch;  // state.epoch is one more by then
  const std::string name = format_filename(
      options_.filename,
      {.epoch = epoch, .step = state.global_step, .metrics = &metrics, .nan_if_unknown = may_lack_metrics(trainer)});
  return trainer.free_checkpoint_path(folder(trainer) / name);
}

std::map<fs::path, double> ModelCheckpoint::best_k_models() const {
  std::map<fs::path, double> models;
  for (const Saved& saved : saved_) {
    const bool is_among_best = options_.save_top_k < 0 || std::ssize(models) < options_.save_top_k;
    if (saved.whole && is_ranked(saved) && is_among_best) models.emplace(saved.path, saved.score);
  }
  return models;
}

const ModelCheckpoint::Saved& ModelCheckpoint::best() const {
  static const Saved kNone{{}, kNan, false};
  return saved_.empty() ? kNone : saved_.front();
}

}  // namespace fulgur
