#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/callback.h"
#include "core/metric_log.h"
#include "core/module.h"
#include "core/run_state.h"

namespace fulgur {

// Fires a hook: every callback in list order, then the Module. While it runs, log() does what `scope` allows.
class HookCaller {
 public:
  // All are borrowed and must outlive it.
  HookCaller(const std::vector<std::shared_ptr<Callback>>& callbacks, TrainerControl& control, const RunState& state,
             MetricLog& metrics)
      : callbacks_(callbacks), control_(control), state_(state), metrics_(metrics) {}

  void set_module(Module* module) { module_ = module; }
  Module& module() const { return *module_; }

  // The hook of an entry point or around an epoch.
  template <class... Params, class... Args>
  void call(LogScope scope, void (Callback::*callback_hook)(TrainerControl&, Params...),
            void (Module::*module_hook)(Params...), const Args&... args) {
    call(scope, nullptr, callback_hook, module_hook, args...);
  }

  // The hook around a batch, whose size weighs the means that are logged in it.
  template <class... Params, class... Args>
  void call(LogScope scope, const Batch* batch, void (Callback::*callback_hook)(TrainerControl&, Params...),
            void (Module::*module_hook)(Params...), const Args&... args) {
    enter(scope, batch);
    for (const auto& callback : callbacks_) (callback.get()->*callback_hook)(control_, args...);
    (module_->*module_hook)(args...);
  }

  // A hook that only callbacks have, or only those for which `wanted` holds get now.
  template <class Wanted, class... Params, class... Args>
  void call_callbacks(LogScope scope, Wanted wanted, void (Callback::*hook)(TrainerControl&, Params...),
                      const Args&... args) {
    enter(scope);
    for (const auto& callback : callbacks_) {
      if (wanted(*callback)) (callback.get()->*hook)(control_, args...);
    }
  }

  void enter(LogScope scope, const Batch* batch = nullptr) { metrics_.enter(state_.stage, scope, batch); }

 private:
  const std::vector<std::shared_ptr<Callback>>& callbacks_;
  TrainerControl& control_;
  const RunState& state_;
  MetricLog& metrics_;
  Module* module_ = nullptr;
};

inline bool any_callback(const Callback&) { return true; }

}  // namespace fulgur
