#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "fulgur/core/module_state.h"
#include "fulgur/strategies/engine/flat_strategy.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

// The part of FlatStrategy that writes checkpoints and resumes from them.
namespace fulgur {

std::vector<std::pair<std::string, at::Tensor>> FlatStrategy::module_state() const {
  TORCH_CHECK(module_ != nullptr, name(), ": there is no module before setup");
  return named_state(*module_);
}

// `pending`: a delayed update was computed, but not yet applied to the parameters. Then the optimizer state is the
// one after the update, and the updated parameters are the ranges' "next" (of 16-bit parameters: "master", rounded).
StrategyState FlatStrategy::state() {
  TORCH_CHECK(flat_, name(), ": there is no state before setup_optimizers");
  const c10::NoGradGuard no_grad;
  if (engine_.drain_before_save) drain();
  if (schedule_) schedule_->wait();
  StrategyState state;
  State& shared = state.shared;
  shared.set("num_steps", num_steps_);
  shared.set("pending", schedule_ && schedule_->is_late());
  if (loss_scaling_) {
    shared.set("loss_scale/scale", loss_scaling_->state().scale);
    shared.set("loss_scale/growth_tracker", loss_scaling_->state().growth_tracker);
  }
  save_optimizers(*module_, optimizers_, shared);
  shard_ ? add_shard_state(state) : add_own_state(state);
  return state;
}

// Each rank writes its range of every bucket, even if it holds the state of the whole bucket.
ElementRange FlatStrategy::written_range(size_t bucket) const {
  return rank_range(flat_->buckets()[bucket].flat.numel(), world_->rank(), world_->world_size());
}

void FlatStrategy::add_shard_state(StrategyState& state) const {
  std::vector<int64_t> num_updates;  // by parameter, in the order of buckets
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    auto ranges = shard_->state_ranges(b, written_range(b), schedule_->is_late(), schedule_->updates(b));
    std::ranges::move(ranges, std::back_inserter(state.ranges));
    std::ranges::copy(shard_->num_updates(b), std::back_inserter(num_updates));
  }
  const at::Tensor everywhere = at::tensor(num_updates, at::kLong);  // 0 on ranks without an element of a parameter
  if (!alone()) world_->control().all_reduce(everywhere, ReduceOp::max).wait();
  std::unordered_map<const c10::TensorImpl*, int64_t> updates_of;
  const int64_t* next = everywhere.const_data_ptr<int64_t>();
  for (const auto& bucket : flat_->buckets()) {
    for (const auto& slot : bucket.slots) updates_of[slot.param.unsafeGetTensorImpl()] = *next++;
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    const auto updates = updates_of.find(trained.param.unsafeGetTensorImpl());
    if (updates != updates_of.end()) {
      save_num_updates(state.shared, trained, updates->second);
      continue;
    }
    const auto resting = resting_states_.find(trained.param.unsafeGetTensorImpl());
    const int64_t size = trained.param.numel();
    if (resting == resting_states_.end() || resting->second.num_updates == 0 || size == 0) continue;
    save_num_updates(state.shared, trained, resting->second.num_updates);
    if (world_->rank() == 0) state.ranges.push_back({trained.name, 0, size, part_of(resting->second, 0, size)});
  }
}

void FlatStrategy::add_own_state(StrategyState& state) const {
  std::unordered_map<const c10::TensorImpl*, ElementRange> mine;  // this rank's range of each parameter in a bucket
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const auto& bucket = flat_->buckets()[b];
    for (const auto& slot : bucket.slots) mine[slot.param.unsafeGetTensorImpl()] = {0, 0};
    for (const Piece& piece : pieces_in(bucket, written_range(b))) {
      mine[bucket.slots[piece.slot].param.unsafeGetTensorImpl()] = {piece.begin, piece.begin + piece.num_elements};
    }
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    const ParameterState whole = trained.optimizer->parameter_state(trained.group, trained.index);
    save_num_updates(state.shared, trained, whole.num_updates);
    const auto in_bucket = mine.find(trained.param.unsafeGetTensorImpl());
    const ElementRange resting{0, world_->rank() == 0 ? trained.param.numel() : 0};
    const ElementRange range = in_bucket == mine.end() ? resting : in_bucket->second;
    if (whole.num_updates == 0 || range.size() == 0) continue;
    state.ranges.push_back({trained.name, range.begin, range.end, part_of(whole, range.begin, range.size())});
  }
}

void FlatStrategy::load_state(const State& shared, const ReadRange& read) {
  const c10::NoGradGuard no_grad;
  load_optimizers(*module_, optimizers_, shared);
  num_steps_ = shared.get<int64_t>("num_steps");
  const State scale = shared.child("loss_scale");
  if (loss_scaling_ && !scale.empty()) {
    loss_scaling_->load_state(
        {.scale = scale.get<double>("scale"), .growth_tracker = scale.get<int64_t>("growth_tracker")});
  }
  bool pending = shared.get<bool>("pending");
  if (pending && !engine_.delayed) {
    finish_saved_update(shared, read);
    pending = false;
  }
  shard_ ? load_shard_state(shared, read, pending) : load_own_state(shared, read);
  if (pending) schedule_->resume_late();
}

// Applies the pending update of a checkpoint from a run with delayed updates, because this strategy has none.
void FlatStrategy::finish_saved_update(const State& shared, const ReadRange& read) {
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    at::Tensor(trained.param).copy_(updated_parameter(read_whole(trained, shared, read), trained.param));
  }
  flatten();  // remakes the copies of parameters
}

void FlatStrategy::load_shard_state(const State& shared, const ReadRange& read, bool pending) {
  std::unordered_set<const c10::TensorImpl*> in_buckets;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    std::vector<int64_t> num_updates;
    for (const auto& slot : flat_->buckets()[b].slots) {
      num_updates.push_back(saved_num_updates(shared, slot.name));
      in_buckets.insert(slot.param.unsafeGetTensorImpl());
    }
    shard_->load_ranges(b, num_updates, read, pending);
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    if (in_buckets.contains(trained.param.unsafeGetTensorImpl())) continue;
    ParameterState& resting = resting_states_[trained.param.unsafeGetTensorImpl()];
    resting = read_whole(trained, shared, read);
    if (pending) at::Tensor(trained.param).copy_(updated_parameter(resting, trained.param));
    resting.tensors.erase("next");
    for (auto& [name, tensor] : resting.tensors) tensor = tensor.clone();
  }
}

void FlatStrategy::load_own_state(const State& shared, const ReadRange& read) {
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    trained.optimizer->load_parameter_state(trained.group, trained.index, read_whole(trained, shared, read));
  }
}

}  // namespace fulgur
