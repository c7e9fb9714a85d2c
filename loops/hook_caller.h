#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fulgur/base/exception_text.h"
#include "fulgur/base/trace.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/module.h"
#include "fulgur/core/run_state.h"
#include "fulgur/loops/hooks.h"

namespace fulgur {

// Fires a hook: every callback in list order, then the Module. While a hook runs, log() does what the hook's scope
// allows, and an exception that the hook throws is annotated with its place (base/exception_text.h).
class HookCaller {
 public:
  using Callbacks = std::vector<std::shared_ptr<Callback>>;

  // All references are borrowed and must outlive the HookCaller.
  HookCaller(const Callbacks& callbacks, TrainerControl& control, Module& module, const RunState& state,
             MetricLog& metrics)
      : callbacks_(callbacks), control_(control), module_(module), state_(state), metrics_(metrics) {}

  Module& module() const { return module_; }
  const Callbacks& callbacks() const { return callbacks_; }

  // Calls `body` as `hook`; hooks nest (manual_backward within training_step).
  template <class Body>
  decltype(auto) within(const Hook& hook, const Body& body) {
    const Scope scope(*this, hook);
    const trace::Span span(hook.name);
    try {
      return body();
    } catch (...) {
      note_place(std::current_exception(), place(hook.name, what_runs_in(hook)));
      throw;
    }
  }

  // How precisely a place is named: code may run for the whole run, for an epoch, or for a batch.
  enum class WhatRuns { run, epoch, batch };

  // Calls `body`, which is not a hook and may not log(). The place of its exceptions is, for example, "in the train
  // loader (train, epoch 0, batch 3)".
  template <class Body>
  decltype(auto) located(std::string_view what, WhatRuns runs, const Body& body) const {
    try {
      return body();
    } catch (...) {
      note_place(std::current_exception(), place(what, runs));
      throw;
    }
  }

  template <class CallbackMember, class ModuleMember, class... Args>
  void operator()(const hooks::SharedHook<CallbackMember, ModuleMember>& hook, Args&&... args) {
    within(hook, [&] {
      for (const auto& callback : callbacks_) {
        const trace::Span span(span_name(*callback, hook));
        (callback.get()->*hook.callback)(control_, args...);
      }
      const trace::Span span(span_name(module_, hook));
      (module_.*hook.module)(args...);
    });
  }

  // Asks all callbacks that judge updates; returns false if any of them does not accept this one.
  bool accepts_update(double loss, double grad_norm) {
    return within(hooks::accepts_update, [&] {
      bool is_accepted = true;
      for (const auto& callback : callbacks_) {
        if (!callback->judges_updates()) continue;
        const trace::Span span(span_name(*callback, hooks::accepts_update));
        is_accepted &= callback->accepts_update(control_, loss, grad_norm);
      }
      return is_accepted;
    });
  }

  // Fires on_train_batch_start for all callbacks and the Module; returns skip_epoch if any of them does.
  BatchAction train_batch_start(const Batch& batch, int64_t batch_idx) {
    return within(hooks::on_train_batch_start, [&] {
      bool skip = false;
      for (const auto& callback : callbacks_) {
        const trace::Span span(span_name(*callback, hooks::on_train_batch_start));
        skip |= callback->on_train_batch_start(control_, batch, batch_idx) == BatchAction::skip_epoch;
      }
      const trace::Span span(span_name(module_, hooks::on_train_batch_start));
      skip |= module_.on_train_batch_start(batch, batch_idx) == BatchAction::skip_epoch;
      return skip ? BatchAction::skip_epoch : BatchAction::run;
    });
  }

  // Fires a hook that only callbacks have, for the callbacks for which `wanted` holds.
  template <class Wanted, class... Params, class... Args>
  void callbacks_where(Wanted wanted, const Hook& hook, void (Callback::*member)(TrainerControl&, Params...),
                       const Args&... args) {
    within(hook, [&] {
      for (const auto& callback : callbacks_) {
        if (!wanted(*callback)) continue;
        const trace::Span span(span_name(*callback, hook));
        (callback.get()->*member)(control_, args...);
      }
    });
  }
  template <class... Params, class... Args>
  void callbacks_only(const Hook& hook, void (Callback::*member)(TrainerControl&, Params...), const Args&... args) {
    callbacks_where([](const Callback&) { return true; }, hook, member, args...);
  }

  // Keeps a record of a training batch until the metrics of its step are sent. An accumulation window, or a step that
  // is tried again, may log a name several times: the last one counts.
  void keep(const Record& record, int64_t step) {
    if (std::exchange(step_of_records_, step) != step) records_.clear();
    records_.insert_or_assign({record.name, record.content.index()}, record);
  }

  // Sends metrics to the loggers, unless there are no metrics, and the records that were kept for the step. A metric
  // named "step" replaces `step`.
  void send(Metrics metrics, int64_t step) {
    if (state_.stage == Stage::train && step == step_of_records_) {
      for (const auto& [name, record] : std::exchange(records_, {})) {
        callbacks_only(hooks::on_record, &Callback::on_record, record, step);
      }
    }
    if (const auto own_step = metrics.extract("step")) step = static_cast<int64_t>(own_step.mapped());
    if (!metrics.empty()) callbacks_only(hooks::on_metrics, &Callback::on_metrics, std::as_const(metrics), step);
  }

 private:
  // Marks `hook` as the running hook for the lifetime of the object.
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

  // "ModelCheckpoint.on_train_epoch_end", or, if nobody looks at spans, empty. Valid until the HookCaller is destroyed.
  template <class Owner>
  std::string_view span_name(const Owner& owner, const Hook& hook) {
    return trace::enabled() ? name_of_span(typeid(owner), hook) : std::string_view();
  }
  std::string_view name_of_span(const std::type_info& owner, const Hook& hook);

  WhatRuns what_runs_in(const Hook& hook) const;
  std::string place(std::string_view what, WhatRuns runs) const;

  const Callbacks& callbacks_;
  TrainerControl& control_;
  Module& module_;
  const RunState& state_;
  MetricLog& metrics_;
  std::map<std::pair<const std::type_info*, const Hook*>, std::string> span_names_;
  std::map<std::pair<std::string, size_t>, Record> records_;  // by name and kind, until their step's metrics are sent
  int64_t step_of_records_ = -1;
};

}  // namespace fulgur
