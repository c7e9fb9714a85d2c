#include "fulgur/strategies/forwarding_strategy.h"

#include <c10/util/Exception.h>

#include "fulgur/strategies/presets.h"

namespace fulgur {

ForwardingStrategy::ForwardingStrategy(std::string_view base) : base_(strategy_registry().create(base)) {}

ForwardingStrategy::ForwardingStrategy(std::unique_ptr<Strategy> base) : base_(std::move(base)) {
  TORCH_CHECK_VALUE(base_ != nullptr, "ForwardingStrategy: the strategy to forward to is null");
}

std::string ForwardingStrategy::name() const { return base_->name(); }

void ForwardingStrategy::describe(FieldVisitor& visit) { base_->describe(visit); }

void ForwardingStrategy::check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const {
  base_->check_devices(devices, num_nodes);
}

std::optional<WorldOptions> ForwardingStrategy::rank_per_device() const { return base_->rank_per_device(); }

void ForwardingStrategy::setup(Module& module, const StrategySetup& setup) { base_->setup(module, setup); }

void ForwardingStrategy::setup_optimizers(Optimizers optimizers) { base_->setup_optimizers(std::move(optimizers)); }

const Optimizers& ForwardingStrategy::optimizers() const { return base_->optimizers(); }

Batch ForwardingStrategy::to_device(const Batch& batch) { return base_->to_device(batch); }

at::Tensor ForwardingStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  return base_->training_step(batch, batch_idx);
}

void ForwardingStrategy::zero_grad(size_t optimizer) { base_->zero_grad(optimizer); }

void ForwardingStrategy::backward(const at::Tensor& loss, bool is_last) { base_->backward(loss, is_last); }

AccumulationWindow ForwardingStrategy::end_micro_batch(const AccumulationWindow& mine, bool is_last) {
  return base_->end_micro_batch(mine, is_last);
}

void ForwardingStrategy::manual_backward(const at::Tensor& loss) { base_->manual_backward(loss); }

std::optional<ModelMemory> ForwardingStrategy::model_memory(const Module& module, const Optimizers& optimizers,
                                                            const MemoryRequest& request) const {
  return base_->model_memory(module, optimizers, request);
}

StepReport ForwardingStrategy::optimizer_step(size_t optimizer, const StepRequest& request) {
  return base_->optimizer_step(optimizer, request);
}

void ForwardingStrategy::average_weights(double share) { base_->average_weights(share); }

bool ForwardingStrategy::show_evaluated(bool shown) { return base_->show_evaluated(shown); }

void ForwardingStrategy::drain() { base_->drain(); }

void ForwardingStrategy::materialize_gradients(size_t optimizer, int64_t micro_batches) {
  base_->materialize_gradients(optimizer, micro_batches);
}

std::vector<std::pair<std::string, at::Tensor>> ForwardingStrategy::module_state() const {
  return base_->module_state();
}

StrategyState ForwardingStrategy::state() { return base_->state(); }

void ForwardingStrategy::load_state(const State& shared, const ReadRange& read) { base_->load_state(shared, read); }

void ForwardingStrategy::teardown() noexcept { base_->teardown(); }

}  // namespace fulgur
