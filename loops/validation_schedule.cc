#include "fulgur/loops/validation_schedule.h"

#include <fmt/format.h>

#include <algorithm>

#include "fulgur/base/error.h"

namespace fulgur {

ValidationSchedule::ValidationSchedule(const LoopPlan& plan)
    : interval_(plan.val_check_interval), every_n_epoch_(plan.check_val_every_n_epoch) {}

void ValidationSchedule::set_num_batches(std::optional<int64_t> num_batches) {
  const auto& interval = interval_.value();
  if (const auto* span = std::get_if<TimeSpan>(&interval)) {
    every_ = span->seconds();
  } else if (const auto* batches = std::get_if<Batches>(&interval)) {
    every_n_batches_ = batches->count;
    if (every_n_epoch_ && num_batches && batches->count > *num_batches) {
      throw SetupError(
          fmt::format("val_check_interval = Batches({}) is more than the {} training batches of an epoch, so that "
                      "fit would never validate; lower it, or set check_val_every_n_epoch to nullopt (none) to "
                      "count across epochs",
                      batches->count, *num_batches));
    }
  } else if (const double fraction = std::get<Fraction>(interval).value; fraction < 1.0) {
    if (!num_batches) {
      throw SetupError(
          fmt::format("val_check_interval = Fraction({}), but the train loader does not know its length; write "
                      "Fraction(1.0), a number of Batches or a TimeSpan",
                      fraction));
    }
    every_n_batches_ = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(*num_batches) * fraction));
  }
}

bool ValidationSchedule::validates_in(int64_t epoch) const {
  return !every_n_epoch_ || (epoch + 1) % *every_n_epoch_ == 0;
}

bool ValidationSchedule::due(const RunState& state, int64_t total_batches) const {
  if (!validates_in(state.epoch)) return false;
  if (every_n_batches_) return (every_n_epoch_ ? state.batch_idx + 1 : total_batches) % *every_n_batches_ == 0;
  return every_ ? Clock::now() - last_ >= *every_ : state.is_last_batch;
}

}  // namespace fulgur
