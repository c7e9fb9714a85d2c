#include "fulgur/trainer/resolve_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/callbacks/csv_logger.h"
#include "fulgur/callbacks/evaluation_table.h"
#include "fulgur/callbacks/kineto_profiler.h"
#include "fulgur/callbacks/model_checkpoint.h"
#include "fulgur/callbacks/model_summary.h"
#include "fulgur/callbacks/progress_bar.h"
#include "fulgur/callbacks/run_report.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/trainer/run_dir.h"

namespace fulgur {
namespace {

void check_amounts(const TrainerOptions& options) {
  if (options.overfit_batches && options.overfit_batches->is_zero()) {
    throw UsageError("overfit_batches is 0, so that nothing would be trained; leave it unset to train on all batches");
  }
  if (options.max_time && !(options.max_time->seconds().count() >= 0)) {
    throw UsageError(fmt::format("max_time must not be negative; got {} s; leave it unset for no bound",
                                 options.max_time->seconds().count()));
  }
  if (!options.check_val_every_n_epoch && std::holds_alternative<Fraction>(options.val_check_interval.value())) {
    throw UsageError(
        "check_val_every_n_epoch is none, so that val_check_interval counts across epochs, and a Fraction of an "
        "epoch has no meaning; set val_check_interval to Batches or a TimeSpan");
  }
  if (options.deterministic && options.benchmark.value_or(false)) {
    throw UsageError(
        "benchmark lets cuDNN take another algorithm in each run, and deterministic asks for the same bits; leave one "
        "of them out");
  }
}

void resolve_barebones(TrainerOptions& options) {
  if (!options.barebones) return;
  std::vector<std::string_view> asked_for;
  const auto turn_off = [&](std::optional<bool>& option, std::string_view name) {
    if (option.value_or(false)) asked_for.push_back(name);
    option = false;
  };
  turn_off(options.enable_progress_bar, "enable_progress_bar");
  turn_off(options.enable_model_summary, "enable_model_summary");
  turn_off(options.enable_checkpointing, "enable_checkpointing");
  turn_off(options.logger, "logger");
  turn_off(options.enable_report, "enable_report");
  turn_off(options.enable_post_mortem, "enable_post_mortem");
  if (options.num_sanity_val_steps.value_or(0) != 0) asked_for.push_back("num_sanity_val_steps");
  if (options.log_every_n_steps.value_or(0) != 0) asked_for.push_back("log_every_n_steps");
  if (options.fast_dev_run != 0) asked_for.push_back("fast_dev_run");
  if (options.detect_anomaly) asked_for.push_back("detect_anomaly");
  if (canonical_name(options.profiler) != "none") asked_for.push_back("profiler");
  if (!options.callbacks.empty()) asked_for.push_back("callbacks");
  if (!asked_for.empty()) {
    throw UsageError(fmt::format("barebones turns every extra off, but {} {} set; leave out one or the other",
                                 fmt::join(asked_for, ", "), asked_for.size() == 1 ? "is" : "are"));
  }
  options.num_sanity_val_steps = 0;
}

// Drops ckpt_path, too: the position of a checkpoint in training has no meaning under the bounds of fast_dev_run.
void resolve_fast_dev_run(TrainerOptions& options) {
  if (options.fast_dev_run == 0) return;
  const Batches batches(options.fast_dev_run);
  options.max_epochs = 1;
  options.max_steps = options.fast_dev_run;
  options.min_epochs = options.min_steps = 0;
  options.max_time = std::nullopt;
  options.num_sanity_val_steps = 0;
  options.val_check_interval = Fraction(1.0);
  options.check_val_every_n_epoch = 1;
  options.overfit_batches = std::nullopt;
  options.limit_train_batches = options.limit_val_batches = options.limit_test_batches = options.limit_predict_batches =
      batches;
  options.logger = options.enable_checkpointing = options.enable_report = options.enable_post_mortem = false;
  if (!options.ckpt_path.empty()) {
    log_warning(
        "ckpt_path = '{}' is left out in fast_dev_run, which trains from the start; to try out how a run "
        "resumes, set max_steps to a little more than the checkpoint's in its place",
        options.ckpt_path);
    options.ckpt_path.clear();
  }
  std::erase_if(options.callbacks, [](const auto& callback) { return !callback->runs_in_fast_dev_run(); });
}

template <class Kind>
bool contains(const TrainerOptions& options) {
  return std::ranges::any_of(options.callbacks,
                             [](const auto& callback) { return dynamic_cast<const Kind*>(callback.get()) != nullptr; });
}

template <class Kind>
void add_default(
    TrainerOptions& options, std::optional<bool>& option_value, std::string_view option, std::string_view kind,
    const std::function<std::shared_ptr<Kind>()>& make = [] { return Kind::make(); }) {
  const bool given = contains<Kind>(options);
  const bool enabled = option_value.value_or(true);
  option_value = enabled;
  if (given && !enabled) {
    throw UsageError(fmt::format("Trainer: {} is false, but callbacks has a {}; leave one of them out", option, kind));
  }
  if (enabled && !given) options.callbacks.push_back(make());
}

void add_default_callbacks(TrainerOptions& options) {
  add_default<ModelSummary>(options, options.enable_model_summary, "enable_model_summary", "ModelSummary");
  const auto is_progress_bar = [](const auto& callback) {
    return dynamic_cast<ProgressBar*>(callback.get()) != nullptr;
  };
  if (std::ranges::count_if(options.callbacks, is_progress_bar) > 1) {
    throw UsageError(
        "Trainer: callbacks has two ProgressBars, which would draw over each other; leave one of them out");
  }
  add_default<ProgressBar>(options, options.enable_progress_bar, "enable_progress_bar", "ProgressBar");
  add_default<EvaluationTable>(options, options.enable_progress_bar, "enable_progress_bar", "EvaluationTable");
  add_default<CSVLogger>(options, options.logger, "logger", "CSVLogger");
  if (const std::string unused = changed_fields(options.checkpoint);
      !unused.empty() && contains<ModelCheckpoint>(options)) {
    log_warning("callbacks has a ModelCheckpoint, so that the options of checkpoint are not used: {}", unused);
  }
  add_default<ModelCheckpoint>(options, options.enable_checkpointing, "enable_checkpointing", "ModelCheckpoint",
                               [&] { return ModelCheckpoint::make(options.checkpoint); });
  options.enable_report = options.enable_report.value_or(contains<CSVLogger>(options));
  if (*options.enable_report) options.callbacks.push_back(std::make_shared<RunReport>());
  options.enable_post_mortem = options.enable_post_mortem.value_or(true);
  const bool wants_kineto = canonical_name(options.profiler) == "kineto" && options.fast_dev_run == 0;
  if (wants_kineto && !contains<KinetoProfiler>(options)) {
    options.callbacks.push_back(KinetoProfiler::make());
  }
  std::ranges::stable_partition(options.callbacks, [](const auto& callback) { return !callback->runs_last(); });
}

constexpr int64_t kDefaultMaxEpochs = 1000;  // Lightning's default

bool has_no_bound(const TrainerOptions& options) {
  return !options.max_epochs && options.max_steps < 0 && !options.max_time;
}

}  // namespace

TrainerOptions resolve(TrainerOptions options) {
  check_fields("Trainer", options);
  options.optimizer.check();
  check_amounts(options);
  static_cast<void>(Precision(options.precision));                                   // throws if the name is unknown
  if (!options.name.empty()) named_run_dir(options.default_root_dir, options.name);  // throws if it is no name
  if (std::ranges::count(options.callbacks, nullptr) > 0) throw UsageError("Trainer: one of the callbacks is null");
  resolve_barebones(options);
  resolve_fast_dev_run(options);
  if (options.overfit_batches) options.limit_train_batches = options.limit_val_batches = *options.overfit_batches;
  options.num_sanity_val_steps = options.num_sanity_val_steps.value_or(2);
  add_default_callbacks(options);
  return options;
}

LoopPlan::Bounds bounds_of(const TrainerOptions& given) {
  return {.max_epochs = has_no_bound(given) ? kDefaultMaxEpochs : given.max_epochs.value_or(-1),
          .max_steps = given.max_steps,
          .limit_train_batches = given.overfit_batches.value_or(given.limit_train_batches)};
}

LoopPlan plan_of(const TrainerOptions& options, const LoopPlan::Bounds& whole) {
  return {.max_epochs = has_no_bound(options) ? kDefaultMaxEpochs : options.max_epochs.value_or(-1),
          .min_epochs = options.min_epochs,
          .max_steps = options.max_steps,
          .min_steps = options.min_steps,
          .max_time = options.max_time,
          .limit_train_batches = options.limit_train_batches,
          .limit_val_batches = options.limit_val_batches,
          .overfits = options.overfit_batches.has_value(),
          .reload_dataloaders_every_n_epochs = options.reload_dataloaders_every_n_epochs,
          .val_check_interval = options.val_check_interval,
          .check_val_every_n_epoch = options.check_val_every_n_epoch,
          .num_sanity_val_steps = options.num_sanity_val_steps.value(),
          .accumulate_grad_batches = options.accumulate_grad_batches,
          .clipping = gradient_clipping(options),
          .detect_anomaly = options.detect_anomaly,
          .log_every_n_steps = options.barebones ? 0 : options.log_every_n_steps,
          .dry_run_of = options.fast_dev_run > 0 ? std::optional(whole) : std::nullopt};
}

void warn_of_default_bound(const TrainerOptions& options) {
  if (!has_no_bound(options)) return;
  log_warning("neither max_epochs, max_steps nor max_time is set; training for {} epochs", kDefaultMaxEpochs);
}

}  // namespace fulgur
