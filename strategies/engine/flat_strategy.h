#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/device/side_worker.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "fulgur/strategies/engine/loss_scaling.h"
#include "fulgur/strategies/engine/memory_of.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/replicas.h"
#include "fulgur/strategies/engine/update_schedule.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// The engine of the presets. The parameters lie in flat buckets, so that they are reduced and updated many at a time.
// With one rank, gradients stay where autograd puts them, and the optimizer's kernel reads them there. With several
// ranks a GradientReducer sums them while backward runs; with several devices Replicas sums them after backward.
// 16-bit gradients of several micro-batches are summed in fp32.
class FlatStrategy : public Strategy {
 public:
  void check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const override {
    fulgur::check_devices(name(), engine_options(), devices, num_nodes);
  }
  std::optional<WorldOptions> rank_per_device() const override { return engine_options().world; }
  void setup(Module& module, const StrategySetup& setup) override;
  void setup_optimizers(Optimizers optimizers) override;
  const Optimizers& optimizers() const override { return optimizers_; }
  Batch to_device(const Batch& batch) override;
  at::Tensor training_step(const Batch& batch, int64_t batch_idx) override;
  void zero_grad(size_t optimizer) override;
  void backward(const at::Tensor& loss, bool is_last) override;
  Window end_micro_batch(const Window& mine, bool is_last) override;
  void manual_backward(const at::Tensor& loss) override;
  std::optional<ModelMemory> model_memory(const Module& module, const Optimizers& optimizers,
                                          const MemoryRequest& request) const override {
    return memory_of(engine_options(), module, optimizers, request);
  }
  StepReport optimizer_step(size_t optimizer, const StepRequest& request) override;
  void drain() override;
  void materialize_gradients(size_t optimizer, int64_t micro_batches) override;
  std::vector<std::pair<std::string, at::Tensor>> module_state() const override;
  StrategyState state() override;
  void load_state(const State& shared, const ReadRange& read) override;
  void teardown() noexcept override;

 private:
  // What the preset that derives from this class asks for. Throws UsageError for settings that would have no effect.
  virtual EngineOptions engine_options() const = 0;

  bool wants_sums() const;
  int64_t wanted_update_threads() const;
  int64_t ranks_that_share(const std::vector<int>& cores) const;

  at::Tensor forward(const Batch& batch, int64_t batch_idx);
  StepReport scaled_step(size_t optimizer, const StepRequest& request);
  void update(size_t optimizer, const GradientTransform& transform);
  GradientTransform transform_for(size_t optimizer, const StepRequest& request, double unscale);
  std::vector<at::Tensor> gradients_here(size_t optimizer) const;
  at::Tensor norm_here(size_t optimizer) const;
  at::Tensor norm_of_all_ranks(const at::Tensor& norm_here) const;
  std::optional<at::Tensor> norm_taken_on_the_way(size_t optimizer) const;
  bool any_non_finite(size_t optimizer);
  void open_window();
  void flatten();
  std::vector<std::pair<std::string, at::Tensor>> take_new_tensors();
  void attach_to_ranks();
  void rebuild_if_changed();
  void drain_and_rebuild_if_changed();
  void check_unchanged() const;
  void check_newcomers() const;
  void warn_of_missing_masters() const;
  void warn_of_unequal_threads() const;
  ElementRange written_range(size_t bucket) const;
  void add_shard_state(StrategyState& state) const;
  void add_own_state(StrategyState& state) const;
  void finish_saved_update(const State& shared, const ReadRange& read);
  void load_shard_state(const State& shared, const ReadRange& read, bool pending);
  void load_own_state(const State& shared, const ReadRange& read);
  void gather_gradients(size_t optimizer);
  void take_gathered_gradients(size_t optimizer);
  void broadcast_buffers();
  void bring_back(Module& module) noexcept;
  void leave_statistics() noexcept;
  bool alone() const { return world_->world_size() == 1; }
  bool keeps_sums() const { return shard_.has_value(); }
  bool reduces_each_micro_batch() const { return keeps_sums() && (alone() || engine_.each_micro_batch); }

  EngineOptions engine_;  // engine_options(), from setup() on
  Module* module_ = nullptr;
  World* world_ = nullptr;
  bool deterministic_ = false;
  int64_t local_world_size_ = 1;
  bool sends_ahead_ = true;
  bool accumulates_ = false;
  LocalCollective alone_;
  c10::Device device_{c10::kCPU};
  std::optional<c10::DeviceGuard> current_device_;  // from setup() to teardown(): new tensors go to the module's device
  Precision precision_;
  std::optional<ConvertedModule> converted_;
  Optimizers optimizers_;
  std::vector<at::Tensor> buffers_;         // buffers of the module, if they are broadcast
  std::shared_ptr<Collective> statistics_;  // the group of SyncBatchNorm on GPUs
  std::optional<FlatParameters> flat_;
  std::unordered_set<const c10::TensorImpl*> members_;  // the optimizers' parameters when flat_ was made, frozen too
  // Parameters and buffers that are the same on every rank. A weak pointer keeps the address of a freed tensor from
  // being reused.
  std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> known_;
  std::optional<OptimizerShard> shard_;       // set if gradient sums are kept apart from the parameters
  bool window_is_open_ = false;               // automatic optimisation: gradients of a step are being computed
  std::vector<bool> are_gathered_{};          // with shard_, by optimizer: parameters hold gathered gradients
  bool wants_norms_ = false;                  // with shard_: a step has requested norms of the gradients
  bool norms_are_known_ = false;              // with shard_: the sums have not changed since the norms were taken
  std::unique_ptr<SideWorker> keeper_;        // with a share on the host: copies sums to the host
  std::optional<GradientReducer> reducer_;    // set with several ranks, or with shard_
  std::unique_ptr<UpdateSchedule> schedule_;  // set with shard_
  int64_t num_update_threads_ = 0;            // 0: the training thread updates
  int64_t num_steps_ = 0;                     // updates, summed over all optimizers
  OptimizerShard::States resting_states_;     // states of parameters that are frozen now; only with shard_
  WarnOnce warn_gathered_;
  std::vector<c10::Device> devices_;         // device_ is the first
  std::optional<Replicas> replicas_;         // with several devices, during fit
  bool has_16_bit_params_ = false;           // some bucket of flat_ is 16-bit
  std::optional<LossScaling> loss_scaling_;  // set if the precision needs a loss scale
};

}  // namespace fulgur
