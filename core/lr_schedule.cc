#include "core/lr_schedule.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fulgur {

LRSchedule::LRSchedule(LRSchedulerConfig config, Optimizer& optimizer)
    : config_(std::move(config)), optimizer_(&optimizer) {
  write_learning_rates();
}

void LRSchedule::step(std::optional<double> metric) {
  TORCH_CHECK_VALUE(metric || !config_.scheduler->needs_metric(), config_.scheduler->name(),
                    " looks at a metric; give its value to step()");
  if (metric) config_.scheduler->observe(*metric);
  ++num_steps_;
  write_learning_rates();
}

void LRSchedule::write_learning_rates() {
  for (size_t i = initial_lrs_.size(); i < optimizer_->groups().size(); ++i) {
    initial_lrs_.push_back(optimizer_->groups()[i].lr);
  }
  for (size_t i = 0; i < initial_lrs_.size(); ++i) {
    optimizer_->groups()[i].lr = config_.scheduler->lr(initial_lrs_[i], num_steps_);
  }
}

}  // namespace fulgur
