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
  visit({.name = "every_n_steps", .help = "optimizer steps between updates; 0: at the end of each epoch", .min = 0},
        &every_n_steps);
  visit({.name = "start_step", .help = "updates begin after this number of optimizer steps", .min = 0}, &start_step);
  visit({.name = "start_epoch", .help = "updates begin in this epoch, from 0 on", .min = 0}, &start_epoch);
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
  if (entry_point == EntryPoint::fit) num_updates_ = last_step_ = 0;
}

void WeightAveraging::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const int64_t step = trainer.state().global_step;
  const bool stepped = std::exchange(last_step_, step) != step;
  if (!stepped || options_.every_n_steps == 0 || (step - options_.start_step) % options_.every_n_steps != 0) return;
  update(trainer);
}

void WeightAveraging::on_train_epoch_end(TrainerControl& trainer) {
  if (options_.every_n_steps == 0) update(trainer);
}

void WeightAveraging::update(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  if (state.global_step <= options_.start_step || state.epoch < options_.start_epoch) return;
  ++num_updates_;
  trainer.average_weights(options_.method == "ema" ? 1.0 - options_.decay : 1.0 / static_cast<double>(num_updates_));
}

void WeightAveraging::on_train_end(TrainerControl& trainer) { trainer.show_average(true); }

State WeightAveraging::state() const {
  State state;
  state.set("num_updates", num_updates_);
  state.set("last_step", last_step_);
  return state;
}

void WeightAveraging::load_state(const State& state) {
  num_updates_ = state.get<int64_t>("num_updates");
  last_step_ = state.get<int64_t>("last_step");
}

}  // namespace fulgur
