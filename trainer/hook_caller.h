#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/callback.h"
#include "core/metric_log.h"
#include "core/module.h"
#include "core/run_state.h"
#include "trainer/hooks.h"

namespace fulgur {

// Fires a hook: every callback in list order, then the Module. While it runs, log() does what the hook's scope allows.
class HookCaller {
 public:
  using Callbacks = std::vector<std::shared_ptr<Callback>>;

  // All are borrowed and must outlive it.
  HookCaller(const Callbacks& callbacks, TrainerControl& control, const RunState& state, MetricLog& metrics)
      : callbacks_(callbacks), control_(control), state_(state), metrics_(metrics) {}

  void set_module(Module* module) { module_ = module; }
  Module& module() const { return *module_; }
  const Callbacks& callbacks() const { return callbacks_; }

  // Says which hook runs for as long as it lives; hooks nest (manual_backward within training_step).
  class Scope {
   public:
    Scope(HookCaller& caller, const Hook& hook) : caller_(caller), outer_(caller.metrics_.hook()) {
      caller_.metrics_.enter(caller_.state_.stage, hook);
    }
    ~Scope() { caller_.metrics_.enter(caller_.state_.stage, outer_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    HookCaller& caller_;
    const Hook& outer_;
  };
  Scope enter(const Hook& hook) { return Scope(*this, hook); }

  template <class CallbackMember, class ModuleMember, class... Args>
  void operator()(const hooks::SharedHook<CallbackMember, ModuleMember>& hook, Args&&... args) {
    const Scope scope(*this, hook);
    for (const auto& callback : callbacks_) (callback.get()->*hook.callback)(control_, args...);
    (module_->*hook.module)(args...);
  }

  // on_train_batch_start: everyone is asked; one that says so skips the rest of the epoch.
  BatchAction train_batch_start(const Batch& batch, int64_t batch_idx) {
    const Scope scope(*this, hooks::on_train_batch_start);
    bool skip = false;
    for (const auto& callback : callbacks_) {
      skip |= callback->on_train_batch_start(control_, batch, batch_idx) == BatchAction::skip_epoch;
    }
    skip |= module_->on_train_batch_start(batch, batch_idx) == BatchAction::skip_epoch;
    return skip ? BatchAction::skip_epoch : BatchAction::run;
  }

  // A hook that only callbacks have, or only those for which `wanted` holds get now.
  template <class Wanted, class... Params, class... Args>
  void callbacks_where(Wanted wanted, const Hook& hook, void (Callback::*member)(TrainerControl&, Params...),
                       const Args&... args) {
    const Scope scope(*this, hook);
    for (const auto& callback : callbacks_) {
      if (wanted(*callback)) (callback.get()->*member)(control_, args...);
    }
  }
  template <class... Params, class... Args>
  void callbacks_only(const Hook& hook, void (Callback::*member)(TrainerControl&, Params...), const Args&... args) {
    callbacks_where([](const Callback&) { return true; }, hook, member, args...);
  }

  // Sends metrics to the loggers; nothing if there are none. A metric named "step" takes the place of `step`.
  void send(Metrics metrics, int64_t step) {
    if (const auto own_step = metrics.extract("step")) step = static_cast<int64_t>(own_step.mapped());
    if (!metrics.empty()) callbacks_only(hooks::on_metrics, &Callback::on_metrics, std::as_const(metrics), step);
  }

 private:
  const Callbacks& callbacks_;
  TrainerControl& control_;
  const RunState& state_;
  MetricLog& metrics_;
  Module* module_ = nullptr;
};

}  // namespace fulgur
