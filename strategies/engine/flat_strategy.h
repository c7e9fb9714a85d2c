#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fulgur/device/copy_stream.h"
#include "fulgur/device/gpu_spans.h"
#include "fulgur/strategies/engine/engine_options.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_store.h"
#include "fulgur/strategies/engine/graphed_step.h"
#include "fulgur/strategies/engine/loss_scaling.h"
#include "fulgur/strategies/engine/memory_of.h"
#include "fulgur/strategies/engine/replicas.h"
#include "fulgur/strategies/engine/shard_groups.h"
#include "fulgur/strategies/engine/weight_average.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// The engine of the presets, which derive from it. The parameters lie in flat buckets, so that they are reduced and
// updated many at a time. A GradientStore keeps the gradients and makes the updates; the strategy moves the module to
// its device and precision, runs it, and decides what a step makes of the gradients: mean, loss scale, clipping. With
// several devices Replicas runs the module on all of them. 16-bit gradients of several micro-batches are summed in
// fp32.
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
  AccumulationWindow end_micro_batch(const AccumulationWindow& mine, bool is_last) override;
  void manual_backward(const at::Tensor& loss) override;
  std::optional<ModelMemory> model_memory(const Module& module, const Optimizers& optimizers,
                                          const MemoryRequest& request) const override {
    return memory_of(engine_options(), module, optimizers, request);
  }
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
  // What the preset that derives from this class asks for. Throws UsageError for settings that would have no effect.
  virtual EngineOptions engine_options() const = 0;

  bool alone() const { return setup_->world.world_size() == 1; }
  c10::Device device() const { return setup_->devices.front(); }
  bool keeps_sums() const;
  BucketOptions bucket_options();

  struct ScaledGradients {
    double unscale = 1.0;  // undoes the loss scale
    at::Tensor norm{};  // the norm of all gradients while they still have the loss scale; undefined if it was not taken
  };

  void prepare_graphs();
  at::Tensor forward(const Batch& batch, int64_t batch_idx);
  StepReport scaled_step(size_t optimizer, const StepRequest& request);
  void update(size_t optimizer, const StepRequest& request, const ScaledGradients& gradients, StepReport& report);
  GradientTransform transform_for(size_t optimizer, const StepRequest& request, const ScaledGradients& gradients,
                                  StepReport& report);
  void open_window();
  std::unique_ptr<GradientStore> make_store();
  std::vector<std::pair<std::string, at::Tensor>> take_new_tensors();
  void attach_to_ranks();
  void take_newcomers();
  static FlatParameters::Generations saved_generations(const State& resumed);
  void agree_on_buckets(const std::vector<std::pair<std::string, at::Tensor>>& added);
  void check_no_newcomers() const;
  void check_newcomers_have_no_gradients() const;
  void check_can_average() const;
  void check_wire() const;
  void warn_of_missing_masters() const;
  void warn_of_unequal_threads() const;
  void average_late_update();
  void broadcast_buffers();
  void scale_earlier_gradients();
  void complete_after_error() noexcept;
  void bring_back(Module& module) noexcept;
  void leave_statistics() noexcept;

  EngineOptions engine_;  // engine_options(), from setup() on
  Module* module_ = nullptr;
  std::optional<StrategySetup> setup_;              // from setup() to teardown()
  std::optional<c10::DeviceGuard> current_device_;  // from setup() to teardown(): new tensors go to the module's device
  std::optional<c10::StreamGuard> stream_;          // set if steps are recorded, which the default stream cannot be
  std::optional<GraphedStep> graphed_step_;         // set if steps are recorded, during fit
  std::optional<CopyStream> batch_copies_;          // on a GPU, from setup() to teardown()
  std::optional<GpuSpans> gpu_spans_;               // from setup() to teardown()
  std::optional<ConvertedModule> converted_;
  // Parameters and buffers that are the same on every rank. A weak pointer keeps the address of a freed tensor from
  // being reused.
  std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> known_;
  std::vector<at::Tensor> buffers_;         // buffers of the module, if they are broadcast
  std::shared_ptr<Collective> statistics_;  // the group of SyncBatchNorm on GPUs
  Optimizers optimizers_;
  std::optional<ShardGroups> groups_;                // from setup_optimizers() on
  FlatParameters::Generations saved_generations_{};  // saved by the run that this one resumes
  std::optional<FlatParameters> flat_;
  bool has_16_bit_params_ = false;  // some bucket of flat_ is 16-bit
  std::unique_ptr<GradientStore> store_;
  std::optional<WeightAverage> average_;
  std::optional<double> share_of_late_;      // add to the average with this share once the delayed update is computed
  bool evaluated_are_shown_ = false;         // parameters are those that are evaluated and saved
  std::optional<Replicas> replicas_;         // with several devices, during fit
  std::optional<LossScaling> loss_scaling_;  // set if the precision needs a loss scale
  bool window_is_open_ = false;              // automatic optimisation: gradients of a step are being computed
  int64_t num_steps_ = 0;                    // updates, summed over all optimizers
};

}  // namespace fulgur
