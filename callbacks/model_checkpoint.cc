#include "callbacks/model_checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/names.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> names_of(const Metrics& metrics) {
  std::vector<std::string> names;
  for (const auto& [name, value] : metrics) names.push_back(name);
  return names;
}

// What a filename can have in braces: epoch and step, which are whole numbers, and every metric.
struct FilenameValues {
  int64_t epoch, step;
  const Metrics* metrics;  // null: of any name, 0.0; to try a pattern out
};

std::string format_value(std::string_view spec, const std::string& name, const FilenameValues& values) {
  const std::string braced = fmt::format("{{{}}}", spec);
  const auto pattern = fmt::runtime(braced);
  if (name == "epoch") return fmt::format(pattern, values.epoch);
  if (name == "step") return fmt::format(pattern, values.step);
  if (values.metrics == nullptr) return fmt::format(pattern, 0.0);
  if (const auto value = values.metrics->find(name); value != values.metrics->end())
    return fmt::format(pattern, value->second);
  std::vector<std::string> known = names_of(*values.metrics);
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

// Of a folder beside the others, whatever the fields are.
void check_filename(const std::string& pattern) {
  const std::string name = format_filename(pattern, {.epoch = 0, .step = 0, .metrics = nullptr});
  if (!name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos) return;
  throw UsageError(
      fmt::format("ModelCheckpoint: filename = '{}' is to be the name of a folder, without '/' and '..'; write the "
                  "folder that it is to be in as dirpath",
                  pattern));
}

}  // namespace

void ModelCheckpointOptions::describe(FieldVisitor& visit) {
  visit({.name = "filename", .help = "pattern of a checkpoint's name"}, &filename);
  visit({.name = "monitor", .help = "metric that tells which checkpoints are best"}, &monitor);
  visit({.name = "mode", .help = "which value of it is better", .choices = {"min", "max"}}, &mode);
  visit({.name = "save_top_k", .help = "how many to keep; -1: all", .min = -1}, &save_top_k);
  visit({.name = "every_n_epochs", .help = "epochs from one save to the next", .min = 1}, &every_n_epochs);
  visit({.name = "every_n_train_steps", .help = "steps from one save to the next; 0: at ends of epochs", .min = 0},
        &every_n_train_steps);
  visit({.name = "save_weights_only", .help = "leave out what a run needs to go on"}, &save_weights_only);
  visit({.name = "async", .help = "write checkpoints beside the training"}, &async);
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
  saved_.clear();
  validated_ = false;
  last_step_ = 0;
}

void ModelCheckpoint::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const int64_t step = trainer.state().global_step;
  if (options_.every_n_train_steps == 0 || step == last_step_ || step % options_.every_n_train_steps != 0) return;
  last_step_ = step;
  save(trainer);
}

void ModelCheckpoint::on_validation_end(TrainerControl& trainer) { validated_ |= !trainer.state().sanity_checking; }

void ModelCheckpoint::on_train_epoch_end(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  const bool validated = std::exchange(validated_, false);
  const bool due = options_.every_n_train_steps == 0 && (state.epoch + 1) % options_.every_n_epochs == 0;
  if (due && (validated || !state.has_validation)) save(trainer);
}

void ModelCheckpoint::save(TrainerControl& trainer) {
  if (options_.save_top_k == 0) return;
  const double new_score = score(trainer);
  const Saved saved{path_for(trainer), new_score, false};
  std::erase_if(saved_, [&](const Saved& other) { return other.path == saved.path; });  // somebody has removed it
  const auto place = std::ranges::find_if(saved_, [&](const Saved& s) { return better(new_score, s.score); });
  const bool is_best = place == saved_.begin();
  saved_.insert(place, saved);
  SaveOptions how{.weights_only = options_.save_weights_only, .async = options_.async, .links = {"last"}};
  if (is_best && !options_.monitor.empty()) how.links.emplace_back("best");
  trainer.save_checkpoint(saved.path, how);
}

// The newest of ours stays, and the best of those that are whole.
void ModelCheckpoint::on_checkpoint_saved(TrainerControl& trainer, const fs::path& folder) {
  const auto newest = std::ranges::find(saved_, folder, &Saved::path);
  if (newest == saved_.end()) return;
  newest->whole = true;
  if (options_.save_top_k < 0) return;
  std::vector<Saved> kept, surplus;
  int64_t num_best = 0;
  for (const Saved& saved : saved_) {
    const bool is_best = saved.whole && num_best++ < options_.save_top_k;
    (is_best || !saved.whole || saved.path == folder ? kept : surplus).push_back(saved);
  }
  saved_ = std::move(kept);
  for (const Saved& saved : surplus) trainer.remove_checkpoint(saved.path);
}

State ModelCheckpoint::state() const {
  State state;
  state.set("validated", validated_);
  state.set("last_step", last_step_);
  state.set("monitor", options_.monitor);
  state.set("mode", options_.mode);
  state.set("num_saved", static_cast<int64_t>(saved_.size()));
  for (size_t i = 0; i < saved_.size(); ++i) {
    state.set(fmt::format("saved/{}/name", i), saved_[i].path.filename().string());
    state.set(fmt::format("saved/{}/score", i), saved_[i].score);
  }
  return state;
}

// Those that are still there, in the folder of this run: it may be a copy of another, or follow it. A score of another
// monitor says nothing.
void ModelCheckpoint::load_state(const State& state) {
  validated_ = state.get<bool>("validated");
  last_step_ = state.get<int64_t>("last_step");
  const auto is_as_now = [&](std::string_view what, const std::string& now) {
    const auto* before = state.find<std::string>(what);
    return before == nullptr || *before == now;
  };
  const bool same_scores = is_as_now("monitor", options_.monitor) && is_as_now("mode", options_.mode);
  saved_.clear();
  for (int64_t i = 0; i < state.get<int64_t>("num_saved"); ++i) {
    const std::optional<fs::path> path = path_of_saved(state.child(fmt::format("saved/{}", i)));
    const auto score = state.get<double>(fmt::format("saved/{}/score", i));
    if (path && fs::exists(*path)) saved_.push_back({*path, same_scores ? score : kNan, true});
  }
}

// Older states have the whole path of each.
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
  if (options_.monitor.empty()) return true;  // newer
  if (std::isnan(a) || std::isnan(b)) return std::isnan(b) && !std::isnan(a);
  return options_.mode == "min" ? a < b : a > b;
}

double ModelCheckpoint::score(TrainerControl& trainer) const {
  if (options_.monitor.empty()) return kNan;
  const Metrics metrics = trainer.metrics().callback_metrics();
  const auto metric = metrics.find(options_.monitor);
  if (metric != metrics.end()) return trainer.from_rank_zero(metric->second);
  throw SetupError("ModelCheckpoint: " + unknown_name_message("monitor", options_.monitor, names_of(metrics)));
}

fs::path ModelCheckpoint::path_for(TrainerControl& trainer) const {
  const Metrics metrics = trainer.metrics().callback_metrics();
  const RunState& state = trainer.state();
  const std::string name =
      format_filename(options_.filename, {.epoch = state.epoch, .step = state.global_step, .metrics = &metrics});
  return trainer.free_checkpoint_path(folder(trainer) / name);
}

const ModelCheckpoint::Saved& ModelCheckpoint::best() const {
  static const Saved kNone{{}, kNan, false};
  return saved_.empty() ? kNone : saved_.front();
}

}  // namespace fulgur
