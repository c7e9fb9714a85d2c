#pragma once

#include <memory>
#include <string_view>

#include "fulgur/strategies/strategy.h"

namespace fulgur {

// A strategy that forwards each call to another strategy, its base. Derive from this class and override the members
// that should differ; docs/extend/strategy.md has an example.
//   struct CountedDdp : ForwardingStrategy {
//     CountedDdp() : ForwardingStrategy("ddp") {}
//     std::string name() const override { return "counted_ddp"; }
//     StepReport optimizer_step(size_t optimizer, const StepRequest& request) override {
//       ++num_steps;
//       return ForwardingStrategy::optimizer_step(optimizer, request);
//     }
//     int64_t num_steps = 0;
//   };
//   strategy_registry().add("counted_ddp", [] { return std::make_unique<CountedDdp>(); });
// The base's settings are this strategy's: --strategy=counted_ddp --strategy.bucket_cap_mib=10. The Trainer's messages,
// the memory table and checkpoints show name(), which is the base's unless it is overridden; messages of the base show
// the base's name. Calls that the base makes on itself do not reach overrides: the base's manual_backward does not call
// an overridden backward.
class ForwardingStrategy : public Strategy {
 public:
  explicit ForwardingStrategy(std::string_view base);           // a registered name; throws UsageError if it is unknown
  explicit ForwardingStrategy(std::unique_ptr<Strategy> base);  // not null

  std::string name() const override;
  void describe(FieldVisitor& visit) override;
  void check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const override;
  std::optional<WorldOptions> rank_per_device() const override;
  void setup(Module& module, const StrategySetup& setup) override;
  void setup_optimizers(Optimizers optimizers) override;
  const Optimizers& optimizers() const override;
  Batch to_device(const Batch& batch) override;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override;
  void zero_grad(size_t optimizer) override;
  void backward(const at::Tensor& loss, bool is_last) override;
  AccumulationWindow end_micro_batch(const AccumulationWindow& mine, bool is_last) override;
  void manual_backward(const at::Tensor& loss) override;
  std::optional<ModelMemory> model_memory(const Module& module, const Optimizers& optimizers,
                                          const MemoryRequest& request) const override;
  StepReport optimizer_step(size_t optimizer, const StepRequest& request) override;
  void average_weights(double share) override;
  bool show_evaluated(bool shown) override;
  void drain() override;
  void materialize_gradients(size_t optimizer, int64_t micro_batches) override;
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override;
  StrategyState state() override;
  void load_state(const State& shared, const ReadRange& read) override;
  void teardown() noexcept override;

 private:
  std::unique_ptr<Strategy> base_;
};

}  // namespace fulgur
