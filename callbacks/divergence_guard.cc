#include "fulgur/callbacks/divergence_guard.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"

namespace fulgur {

void DivergenceGuardOptions::describe(FieldVisitor& visit) {
  visit({.name = "action",
         .help = "what to do about an update whose loss or gradient norm is an outlier: log it, leave it out, leave it "
                 "out and go back to the last checkpoint, or leave it out and end fit",
         .choices = {"warn", "skip", "rollback", "stop"}},
        &action);
  visit({.name = "max_loss_z", .help = "standard deviations by which a loss may exceed the window's mean", .min = 0},
        &max_loss_z);
  visit({.name = "max_norm_z",
         .help = "standard deviations by which a gradient norm may exceed the window's mean",
         .min = 0},
        &max_norm_z);
  visit({.name = "window_size", .help = "updates that mean and deviation are taken over", .min = 2}, &window_size);
  visit({.name = "lr_factor", .help = "factor of all learning rates when action = rollback goes back", .max = 1},
        &lr_factor);
  visit({.name = "most_in_a_row",
         .help = "updates that are left out before fit ends: one after another, or, with action = rollback, with "
                 "fewer than window_size in between",
         .min = 1},
        &most_in_a_row);
}

DivergenceGuard::DivergenceGuard(Options options) : options_(std::move(options)) {
  check_fields("DivergenceGuard", options_);
  options_.action = canonical_name(options_.action);
  if (!(options_.lr_factor > 0.0)) {
    throw UsageError(fmt::format("DivergenceGuard: lr_factor must be above 0; got {}", options_.lr_factor));
  }
}

std::shared_ptr<DivergenceGuard> DivergenceGuard::make(Options options) {
  return std::make_shared<DivergenceGuard>(std::move(options));
}

void DivergenceGuard::setup(TrainerControl&, EntryPoint entry_point) {
  if (entry_point != EntryPoint::fit) return;
  losses_ = norms_ = {};
  num_found_ = in_a_row_ = 0;
}

bool DivergenceGuard::accepts_update(TrainerControl& trainer, double loss, double grad_norm) {
  const auto reason = reason_against(loss, grad_norm);
  const bool skips = reason && options_.action != "warn";
  if (!skips) {
    const auto size = static_cast<size_t>(options_.window_size);
    losses_.add(loss, size);
    norms_.add(grad_norm, size);
  }
  if (!reason) {
    const size_t judged = std::max(losses_.values.size(), norms_.values.size());
    const bool is_full = judged == static_cast<size_t>(options_.window_size);
    if (options_.action != "rollback" || is_full) in_a_row_ = 0;
    return true;
  }
  ++in_a_row_;
  ++num_found_;
  const bool gives_up = options_.action != "warn" && in_a_row_ >= options_.most_in_a_row;
  const std::string done = options_.action == "rollback" && !gives_up ? go_back(trainer) : "";
  if (trainer.is_global_zero() && (skips || in_a_row_ == 1)) {
    log_warning("epoch {}, batch {}: {}{}{}", trainer.state().epoch, trainer.state().batch_idx, *reason,
                skips ? "; the update is left out" : "", done);
  }
  if (options_.action == "stop") {
    trainer.request_stop("DivergenceGuard: " + *reason);
  } else if (gives_up) {
    const std::string apart = options_.action == "rollback"
                                  ? fmt::format(" with fewer than {} in between", options_.window_size)
                                  : " in a row";
    trainer.request_stop(fmt::format("DivergenceGuard has left out {} updates{}", in_a_row_, apart));
  }
  return !skips;
}

std::string DivergenceGuard::go_back(TrainerControl& trainer) {
  const bool has_checkpoint = trainer.roll_back();
  for (size_t i = 0; i < trainer.optimizers().size(); ++i) {
    for (size_t g = 0; g < trainer.optimizers()[i].groups().size(); ++g) trainer.scale_lr(i, g, options_.lr_factor);
  }
  losses_ = norms_ = {};
  return fmt::format("{}, and learning rates are multiplied by {}",
                     has_checkpoint ? ", training goes back to the last checkpoint"
                                    : ", there is no checkpoint to go "
                                      "back to",
                     options_.lr_factor);
}

std::optional<std::string> DivergenceGuard::reason_against(double loss, double grad_norm) const {
  const auto size = static_cast<size_t>(options_.window_size);
  const auto judge = [&](const char* what, double value, const Window& window,
                         double most) -> std::optional<std::string> {
    if (!std::isfinite(value)) return fmt::format("the {} is {}", what, value);
    const auto z = window.z_of(value, size);
    if (!z || *z <= most) return std::nullopt;
    return fmt::format("the {} {:.6g} is {:.1f} standard deviations above the mean of the last {}", what, value, *z,
                       size);
  };
  if (auto reason = judge("loss", loss, losses_, options_.max_loss_z)) return reason;
  return judge("gradient norm", grad_norm, norms_, options_.max_norm_z);
}

std::optional<double> DivergenceGuard::Window::z_of(double value, size_t size) const {
  if (values.size() < size) return std::nullopt;
  double mean = 0.0, variance = 0.0;
  for (const double past : values) mean += past / static_cast<double>(size);
  for (const double past : values) variance += (past - mean) * (past - mean) / static_cast<double>(size);
  if (value <= mean) return 0.0;
  return variance > 0.0 ? (value - mean) / std::sqrt(variance) : std::numeric_limits<double>::infinity();
}

void DivergenceGuard::Window::add(double value, size_t size) {
  if (!std::isfinite(value)) return;
  if (values.size() < size) return values.push_back(value);
  values[next] = value;
  next = (next + 1) % size;
}

State DivergenceGuard::Window::state() const {
  State state;
  state.set("values", at::tensor(values, at::kDouble));
  state.set("next", static_cast<int64_t>(next));
  return state;
}

void DivergenceGuard::Window::load_state(const State& state, int64_t size) {
  const at::Tensor saved = state.get<at::Tensor>("values");
  const int64_t place = state.get<int64_t>("next");
  if (saved.scalar_type() != at::kDouble || saved.numel() > size || place < 0 || place >= size) {
    throw CheckpointError(fmt::format("the state of DivergenceGuard has {} values and place {} of a window of {}",
                                      saved.numel(), place, size));
  }
  const at::Tensor in_order = saved.contiguous();
  const double* numbers = in_order.const_data_ptr<double>();
  values.assign(numbers, numbers + in_order.numel());
  next = static_cast<size_t>(place);
}

State DivergenceGuard::state() const {
  State state;
  state.set("window_size", options_.window_size);
  state.set_child("losses", losses_.state());
  state.set_child("norms", norms_.state());
  state.set("num_found", num_found_);
  state.set("in_a_row", in_a_row_);
  return state;
}

// A window of another size starts over.
void DivergenceGuard::load_state(const State& state) {
  num_found_ = state.get<int64_t>("num_found");
  if (state.get<int64_t>("window_size") != options_.window_size) return;
  losses_.load_state(state.child("losses"), options_.window_size);
  norms_.load_state(state.child("norms"), options_.window_size);
  in_a_row_ = state.get<int64_t>("in_a_row");
}

}  // namespace fulgur
