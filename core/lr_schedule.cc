#include "fulgur/core/lr_schedule.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

void add(State& state, const std::string& name, const nlohmann::json& json) {
  if (json.is_object() || json.is_array()) {
    if (json.is_array()) state.set("num_" + name, static_cast<int64_t>(json.size()));
    State child;
    for (const auto& [key, value] : json.items()) add(child, key, value);
    state.set_child(name, child);
  } else if (json.is_number_float()) {
    state.set(name, json.get<double>());
  } else if (json.is_number_integer()) {
    state.set(name, json.get<int64_t>());
  } else {  // JSON has no infinity
    state.set(name, json.get<std::string>() == "-inf" ? -std::numeric_limits<double>::infinity()
                                                      : std::numeric_limits<double>::infinity());
  }
}

// The state of a built-in scheduler as checkpoints had it before fulgur 0.1.0: a text with JSON.
State state_of_text(std::string_view scheduler, const std::string& text) try {
  const auto parsed = nlohmann::json::parse(text);
  State state;
  for (const auto& [name, value] : parsed.items()) add(state, name, value);
  return state;
} catch (const nlohmann::json::exception& error) {
  throw CheckpointError(fmt::format("the state of {} cannot be read: {}", scheduler, error.what()));
}

}  // namespace

LRSchedule::LRSchedule(LRSchedulerConfig config, Optimizer& optimizer)
    : config_(std::move(config)), optimizer_(&optimizer) {
  write_learning_rates();
}

void LRSchedule::scale(size_t group, double factor) {
  take_new_groups();
  factors_[group] *= factor;
}

void LRSchedule::step(std::optional<double> metric) {
  TORCH_CHECK_VALUE(metric || !config_.scheduler->needs_metric() || config_.scheduler->steps_without_metric(),
                    config_.scheduler->name(), " looks at a metric; give its value to step()");
  if (metric) config_.scheduler->observe(*metric);
  ++num_steps_;
  write_learning_rates();
}

double LRSchedule::lr_after_step(size_t group) const {
  if (group >= initial_lrs_.size()) return config_.scheduler->lr(optimizer_->groups()[group].lr, num_steps_ + 1);
  return factors_[group] * config_.scheduler->lr(initial_lrs_[group], num_steps_ + 1);
}

State LRSchedule::state() const {
  State state;
  state.set("scheduler", std::string(config_.scheduler->name()));
  state.set("num_steps", num_steps_);
  for (size_t i = 0; i < initial_lrs_.size(); ++i) state.set(fmt::format("initial_lr/{}", i), initial_lrs_[i]);
  for (size_t i = 0; i < factors_.size(); ++i) {
    if (factors_[i] != 1.0) state.set(fmt::format("factor/{}", i), factors_[i]);
  }
  state.set_child("state", config_.scheduler->state());
  return state;
}

void LRSchedule::load_state(const State& state) {
  const auto& name = state.get<std::string>("scheduler");
  if (name != config_.scheduler->name()) {
    throw CheckpointError(fmt::format("the checkpoint has the state of a {}, but the scheduler is {} now", name,
                                      config_.scheduler->name()));
  }
  for (size_t i = 0; i < initial_lrs_.size(); ++i) {
    // A group that was added after the schedule's last move has the rate that the optimizer has brought back.
    const auto* initial = state.find<double>(fmt::format("initial_lr/{}", i));
    initial_lrs_[i] = initial == nullptr ? optimizer_->groups()[i].lr : *initial;
  }
  for (size_t i = 0; i < factors_.size(); ++i) {
    const auto* factor = state.find<double>(fmt::format("factor/{}", i));
    factors_[i] = factor == nullptr ? 1.0 : *factor;
  }
  const auto* older = state.find<std::string>("state");
  config_.scheduler->load_state(older == nullptr ? state.child("state") : state_of_text(name, *older));
  num_steps_ = state.get<int64_t>("num_steps");
}

void LRSchedule::take_new_groups() {
  for (size_t i = initial_lrs_.size(); i < optimizer_->groups().size(); ++i) {
    initial_lrs_.push_back(optimizer_->groups()[i].lr);
    factors_.push_back(1.0);
  }
}

void LRSchedule::write_learning_rates() {
  take_new_groups();
  for (size_t i = 0; i < initial_lrs_.size(); ++i) {
    optimizer_->groups()[i].lr = factors_[i] * config_.scheduler->lr(initial_lrs_[i], num_steps_);
  }
}

}  // namespace fulgur
