#include "fulgur/callbacks/weight_averaging.h"

#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {

void WeightAveragingOptions::describe(FieldVisitor& visit) {
  visit({.name = "method",
         .help = "ema: exponential moving average; swa: all updates count the same",
         .choices = {"ema", "swa"}},
        &method);
  visit({.name = "decay", .help = "ema: the share of the average that stays at an update; below 1", .min = 0, .max = 1},
        &decay);
  visit({.name = "every_n_steps",
         .help = "optimizer steps between updates of the average; 0: one at the end of each epoch",
         .min = 0},
        &every_n_steps);
  visit({.name = "start_step", .help = "number of optimizer steps after which updates begin", .min = 0}, &start_step);
  visit({.name = "start_epoch", .help = "epoch in which updates begin, counted from 0", .min = 0}, &start_epoch);
}

WeightAveraging::WeightAveraging(Options options) : options_(std::move(options)) {
  check_fields("WeightAveraging", options_);
  options_.method = canonical_name(options_.method);
  if (options_.decay == 1.0) {
    throw UsageError("WeightAveraging: decay = 1 would keep the first weights for ever; choose less, such as 0.999");
  }
}

std::shared_ptr<WeightAveraging> WeightAveraging::make(Options options) {
  return std::make_shared<WeightAveraging>(std::move(options));
}

void WeightAveraging::setup(TrainerControl&, EntryPoint entry_point) {
  if (entry_point != EntryPoint::fit) return;
  num_updates_ = last_step_ = 0;
  updated_epoch_ = -1;
}

// At the end of an epoch the average is updated before the validation, so that the validation measures that average.
void WeightAveraging::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const bool ends_epoch = options_.every_n_steps == 0 && trainer.state().is_last_batch;
  if (ends_epoch || is_due_after_steps(trainer.state())) update(trainer);
}

// Makes up for a rank that has skipped the epoch: it took part in the last step of the other ranks without a batch of
// its own. An epoch that was cut goes on in the run that resumes, and ends there.
void WeightAveraging::on_train_epoch_end(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  const bool ends_epoch = options_.every_n_steps == 0 && state.epoch_is_complete && updated_epoch_ != state.epoch;
  if (ends_epoch || is_due_after_steps(state)) update(trainer);
}

bool WeightAveraging::is_due_after_steps(const RunState& state) {
  const int64_t before = std::exchange(last_step_, state.global_step);
  if (options_.every_n_steps == 0) return false;
  const auto updates_until = [&](int64_t step) { return (step - options_.start_step) / options_.every_n_steps; };
  return updates_until(state.global_step) != updates_until(before);
}

void WeightAveraging::update(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  if (state.global_step <= options_.start_step || state.epoch < options_.start_epoch) return;
  ++num_updates_;
  updated_epoch_ = state.epoch;
  trainer.average_weights(options_.method == "ema" ? 1.0 - options_.decay : 1.0 / static_cast<double>(num_updates_));
}

void WeightAveraging::on_train_end(TrainerControl& trainer) { trainer.show_evaluated(true); }

State WeightAveraging::state() const {
  State state;
  state.set("num_updates", num_updates_);
  state.set("last_step", last_step_);
  state.set("updated_epoch", updated_epoch_);
  return state;
}

void WeightAveraging::load_state(const State& state) {
  num_updates_ = state.get<int64_t>("num_updates");
  last_step_ = state.get<int64_t>("last_step");
  updated_epoch_ = state.get<int64_t>("updated_epoch");
}

}  // namespace fulgur
