#include "fulgur/callbacks/early_stopping.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/callbacks/monitored.h"

namespace fulgur {

void EarlyStoppingOptions::describe(FieldVisitor& visit) {
  visit({.name = "monitor", .help = "metric that is to improve"}, &monitor);
  visit({.name = "mode", .help = "which value of the monitor is better", .choices = {"min", "max"}}, &mode);
  visit({.name = "patience", .help = "stop after this number of checks in a row without improvement", .min = 1},
        &patience);
  visit({.name = "min_delta", .help = "an improvement is larger than this", .min = 0}, &min_delta);
  visit({.name = "check_finite", .help = "stop when the monitor is NaN or infinite"}, &check_finite);
  visit({.name = "stopping_threshold", .help = "stop once the monitor is better than this"}, &stopping_threshold);
  visit({.name = "divergence_threshold", .help = "stop once the monitor is worse than this"}, &divergence_threshold);
}

EarlyStopping::EarlyStopping(Options options) : options_(std::move(options)) {
  check_fields("EarlyStopping", options_);
  options_.mode = canonical_name(options_.mode);
  if (options_.monitor.empty()) {
    throw UsageError(
        "EarlyStopping: monitor is empty; set it to the name of a metric that is logged, such as val_loss");
  }
}

std::shared_ptr<EarlyStopping> EarlyStopping::make(Options options) {
  return std::make_shared<EarlyStopping>(std::move(options));
}

void EarlyStopping::setup(TrainerControl&, EntryPoint entry_point) {
  if (entry_point == EntryPoint::fit) counts_ = {};
}

void EarlyStopping::on_fit_start(TrainerControl& trainer) {
  if (const auto reason = reason_to_stop()) trainer.request_stop(*reason);  // the run that resumes was about to stop
}

void EarlyStopping::on_train_start(TrainerControl& trainer) {
  warn_if_never_validated(trainer, "EarlyStopping", options_.monitor);
}

void EarlyStopping::on_validation_end(TrainerControl& trainer) {
  if (trainer.state().sanity_checking || trainer.state().entry_point != EntryPoint::fit) return;
  counts_.has_validated = true;
  if (!is_known(trainer, trainer.metrics().was_reduced(options_.monitor))) return;
  counts_.is_validated = true;
  check(trainer);
}

void EarlyStopping::on_train_epoch_end(TrainerControl& trainer) {
  if (counts_.is_validated) return;
  const Metrics metrics = trainer.metrics().callback_metrics();
  if (is_known(trainer, metrics.contains(options_.monitor))) {
    if (trainer.state().epoch_is_complete) check(trainer);  // otherwise the run that resumes will check
    return;
  }
  if (trainer.state().has_validation && !counts_.has_validated) return;  // a validation may log it yet
  throw_unknown_monitor(trainer, "EarlyStopping", options_.monitor, metrics);
}

// Rank 0 decides: with sync_dist = false ranks may log different names.
bool EarlyStopping::is_known(TrainerControl& trainer, bool here) {
  return trainer.from_rank_zero(here ? 1.0 : 0.0) > 0.0;
}

void EarlyStopping::check(TrainerControl& trainer) {
  const Metrics metrics = trainer.metrics().callback_metrics();
  const auto here = metrics.find(options_.monitor);
  counts_.last = trainer.from_rank_zero(here == metrics.end() ? 0.0 : here->second);
  ++counts_.checks;
  ++counts_.wait;
  if (improves(counts_.last)) {
    counts_.best = counts_.last;
    counts_.wait = 0;
  }
  if (const auto reason = reason_to_stop()) trainer.request_stop(*reason);
}

bool EarlyStopping::improves(double value) const {
  if (std::isnan(counts_.best)) return !std::isnan(value);
  return better(value, options_.mode == "min" ? counts_.best - options_.min_delta : counts_.best + options_.min_delta);
}

std::optional<std::string> EarlyStopping::reason_to_stop() const {
  if (counts_.checks == 0) return std::nullopt;
  const double last = counts_.last;
  const std::string_view unit = counts_.is_validated ? "validation" : "epoch";
  const auto because = [&](const std::string& what) {
    return fmt::format("'{}' {} in {} {}", options_.monitor, what, unit, counts_.checks);
  };
  if (options_.check_finite && !std::isfinite(last)) return because(fmt::format("is {}", last));
  if (const auto& threshold = options_.stopping_threshold; threshold && better(last, *threshold)) {
    return because(fmt::format("= {:.6g} is better than the stopping_threshold {:.6g}", last, *threshold));
  }
  if (const auto& threshold = options_.divergence_threshold; threshold && better(*threshold, last)) {
    return because(fmt::format("= {:.6g} is worse than the divergence_threshold {:.6g}", last, *threshold));
  }
  if (counts_.wait < options_.patience) return std::nullopt;
  const std::string margin = options_.min_delta > 0 ? fmt::format(" by more than {:.6g}", options_.min_delta) : "";
  return fmt::format("'{}' has not improved on {:.6g}{} in {} {}{} (mode = {})", options_.monitor, counts_.best, margin,
                     counts_.wait, unit, counts_.wait == 1 ? "" : "s", options_.mode);
}

State EarlyStopping::state() const {
  State state;
  state.set("monitor", options_.monitor);
  state.set("mode", options_.mode);
  state.set("checks", counts_.checks);
  state.set("wait", counts_.wait);
  state.set("best", counts_.best);
  state.set("last", counts_.last);
  state.set("is_validated", counts_.is_validated);
  state.set("has_validated", counts_.has_validated);
  return state;
}

// Counts of another monitor or mode are of no use.
void EarlyStopping::load_state(const State& state) {
  if (state.get<std::string>("monitor") != options_.monitor || state.get<std::string>("mode") != options_.mode) return;
  counts_ = {.checks = state.get<int64_t>("checks"),
             .wait = state.get<int64_t>("wait"),
             .best = state.get<double>("best"),
             .last = state.get<double>("last"),
             .is_validated = state.get<bool>("is_validated"),
             .has_validated = state.get<bool>("has_validated")};
}

}  // namespace fulgur
