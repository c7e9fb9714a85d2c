#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/strategies/strategy.h"
#include "fulgur/strategies/strategy_choice.h"

namespace fulgur {

// A strategy that does everything as another one, its base: derive from it and override what differs. The settings of
// the base are its settings. docs/extend/strategy.md has an example.
//   struct Mine : ForwardingStrategy {
//     Mine() : ForwardingStrategy("ddp") {}
//     std::string name() const override { return "mine"; }
//     StepReport optimizer_step(size_t optimizer, const StepRequest& request) override;
//   };
//   strategy_registry().add("mine", [] { return std::make_unique<Mine>(); });
class ForwardingStrategy : public Strategy {
 public:
  // Throws UsageError for an unknown name, an unknown setting, or a wrong value.
  explicit ForwardingStrategy(const StrategyChoice& base) : base_(base.make("single_device")) {}

  void describe(FieldVisitor& visit) override { base_->describe(visit); }
  void check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const override {
    base_->check_devices(devices, num_nodes);
  }
  std::optional<WorldOptions> rank_per_device() const override { return base_->rank_per_device(); }
  void setup(Module& module, const StrategySetup& setup) override { base_->setup(module, setup); }
  void setup_optimizers(Optimizers optimizers) override { base_->setup_optimizers(std::move(optimizers)); }
  const Optimizers& optimizers() const override { return base_->optimizers(); }
  Batch to_device(const Batch& batch) override { return base_->to_device(batch); }
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override {
    return base_->training_step(batch, batch_idx);
  }
  void zero_grad(size_t optimizer) override { base_->zero_grad(optimizer); }
  void backward(const at::Tensor& loss, bool is_last) override { base_->backward(loss, is_last); }
  Window end_micro_batch(const Window& mine, bool is_last) override { return base_->end_micro_batch(mine, is_last); }
  void manual_backward(const at::Tensor& loss) override { base_->manual_backward(loss); }
  std::optional<ModelMemory> model_memory(const Module& module, const Optimizers& optimizers,
                                          const MemoryRequest& request) const override {
    return base_->model_memory(module, optimizers, request);
  }
  StepReport optimizer_step(size_t optimizer, const StepRequest& request) override {
    return base_->optimizer_step(optimizer, request);
  }
  void drain() override { base_->drain(); }
  void materialize_gradients(size_t optimizer, int64_t micro_batches) override {
    base_->materialize_gradients(optimizer, micro_batches);
  }
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override { return base_->module_state(); }
  StrategyState state() override { return base_->state(); }
  void load_state(const State& shared, const ReadRange& read) override { base_->load_state(shared, read); }
  void teardown() noexcept override { base_->teardown(); }

 protected:
  Strategy& base() const { return *base_; }

 private:
  std::unique_ptr<Strategy> base_;
};

}  // namespace fulgur
