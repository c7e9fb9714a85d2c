#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/device/stream_worker.h"
#include "fulgur/strategies/engine/gradient_memory.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "fulgur/strategies/engine/gradient_store.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/update_schedule.h"

namespace fulgur {

// Sums of gradients lie apart from the parameters, in the ranges of the buckets that this rank updates: its shard
// (EngineOptions::shard), or the whole. A share of a range may be on the host, and updates may be delayed. For
// automatic optimisation, with one optimizer.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021, arXiv:2101.06840.
class SeparateGradients final : public GradientStore {
 public:
  // Throws UsageError for an optimizer that needs whole tensors, and if the host has too little memory.
  explicit SeparateGradients(const GradientContext& context);

  bool collects_in_buckets() const override { return true; }
  void append() override;
  void open_window() override;
  ScopedGradientMemory begin_backward(bool is_last) override;
  std::optional<AccumulationWindow> end_micro_batch(const AccumulationWindow& mine, bool is_last) override;
  at::Tensor norm(size_t optimizer) override;
  void show(size_t optimizer) override;
  void take_back(size_t optimizer) override;
  void update(size_t optimizer, const GradientTransform& transform, const std::vector<double>& next_lr,
              bool late) override;
  void drain() override { schedule_->drain(); }
  void wait() override { schedule_->wait(); }
  bool is_late() const override { return schedule_->is_late(); }
  void show_exact() override;
  void hide_exact() override;
  void parameters_were_written() override;
  std::vector<ExactValues> exact_values(size_t bucket, ElementRange within) const override;
  void save(StrategyState& state) override;
  void load(const State& shared, const ReadRange& read, bool late) override;

 private:
  void say_what_is_late() const;
  bool reduces_each_micro_batch() const { return context_.alone() || context_.engine.each_micro_batch; }
  bool each_has_a_part() const { return context_.engine.shard && !context_.alone(); }
  at::Tensor norm_here() const;
  at::Tensor range_of(size_t bucket) const;
  optim::PredictBy predict(size_t optimizer) const;
  void gather_parameters();
  std::vector<bool> late_buckets(const State& shared) const;

  const GradientContext context_;
  OptimizerShard shard_;
  std::unique_ptr<StreamWorker> copy_worker_;  // with a share on the host: copies sums there
  std::optional<GradientReducer> reducer_;
  std::unique_ptr<UpdateSchedule> schedule_;
  std::vector<at::Tensor> for_forward_{};  // while exact ones are shown: the parameters that forward reads, by bucket
  bool wants_norms_ = false;               // a step has requested norms of the gradients
  bool is_shown_ = false;                  // parameters hold gathered gradients
  WarnOnce warn_shown_;
};

}  // namespace fulgur
