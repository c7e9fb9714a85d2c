#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string_view>

#include "fulgur/base/logging.h"
#include "fulgur/core/module.h"
#include "fulgur/core/module_state.h"
#include "fulgur/strategies/engine/flat_strategy.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

// The part of FlatStrategy that writes checkpoints and resumes from them.
namespace fulgur {
namespace {

constexpr std::string_view kGenerations = "generations";  // FlatParameters::Generations, by parameter

// Saves only the parameters that a new run of this module would put elsewhere, leave out because they are frozen, or
// not leave out because they were unfrozen and no step has come since.
void save_generations(const FlatParameters& parameters, const std::vector<Trained>& trained, State& shared) {
  const auto save = [&](const std::string& name, int64_t generation) {
    shared.set(fmt::format("{}/{}", kGenerations, name), generation);
  };
  for (const auto& bucket : parameters.buckets()) {
    for (const auto& slot : bucket.slots) {
      if (bucket.generation > 0 || !slot.param.requires_grad()) save(slot.name, bucket.generation);
    }
  }
  for (const Trained& each : trained) {
    if (each.param.requires_grad() && !parameters.contains(each.param)) save(each.name, FlatParameters::kOutside);
  }
}

}  // namespace

// Earlier versions of fulgur did not save them: a parameter that was trained then goes with the first.
FlatParameters::Generations FlatStrategy::saved_generations(const State& resumed) {
  FlatParameters::Generations generations;
  const State updates = resumed.child("num_updates"), saved = resumed.child(kGenerations);
  for (const auto& [name, value] : updates.values()) generations[name] = 0;
  for (const auto& [name, value] : saved.values()) generations[name] = saved.get<int64_t>(name);
  return generations;
}

std::vector<std::pair<std::string, at::Tensor>> FlatStrategy::module_state() const {
  TORCH_CHECK(module_ != nullptr, name(), ": there is no module before setup");
  return named_state(*module_);
}

// A delayed update in progress is saved as computed, with what the next steps read (SeparateGradients::save).
StrategyState FlatStrategy::state() {
  TORCH_CHECK(flat_, name(), ": there is no state before setup_optimizers");
  const c10::NoGradGuard no_grad;
  StrategyState state;
  State& shared = state.shared;
  shared.set("num_steps", num_steps_);
  shared.set("late", store_->is_late());
  if (loss_scaling_) {
    shared.set("loss_scale/scale", loss_scaling_->state().scale);
    shared.set("loss_scale/growth_tracker", loss_scaling_->state().growth_tracker);
  }
  save_optimizers(*module_, optimizers_, shared);
  save_generations(*flat_, trained_params(*module_, optimizers_), shared);
  store_->save(state);
  average_->add_to(state);
  return state;
}

void FlatStrategy::load_state(const State& shared, const ReadRange& read) {
  const c10::NoGradGuard no_grad;
  const bool has_made_steps = num_steps_ > 0;
  TORCH_INTERNAL_ASSERT(!store_->is_late() && !evaluated_are_shown_);
  if (const bool* pending = shared.find<bool>("pending"); pending != nullptr && *pending) {
    throw CheckpointError(
        "the checkpoint was written while a delayed update was in progress, by an earlier version of fulgur, which "
        "kept it in another way; load the weights only, which lack that update");
  }
  load_optimizers(*module_, optimizers_, shared);
  if (has_made_steps) {  // gradients of other weights, and of another loss scale, are dropped
    for (size_t i = 0; i < optimizers_.size(); ++i) zero_grad(i);
    store_->parameters_were_written();
  }
  num_steps_ = shared.get<int64_t>("num_steps");
  const State scale = shared.child("loss_scale");
  if (loss_scaling_ && !scale.empty()) {
    loss_scaling_->load_state(
        {.scale = scale.get<double>("scale"), .growth_tracker = scale.get<int64_t>("growth_tracker")});
  }
  if (average_->load(shared, read, /*keeps=*/setup_->averages_weights)) {
    store_->parameters_were_written();
    if (!setup_->averages_weights && setup_->world.rank() == 0) {
      log_warning("the checkpoint has an average of the weights, which this run does not continue");
    }
  }
  const bool* late = shared.find<bool>("late");  // earlier versions of fulgur did not write it
  store_->load(shared, read, /*late=*/late != nullptr && *late && engine_.delayed && !has_made_steps);
}

}  // namespace fulgur
