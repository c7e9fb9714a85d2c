#include "fulgur/core/module.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <typeinfo>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/type_name.h"
#include "fulgur/core/ready_gradients.h"
#include "fulgur/core/step_recording.h"

namespace fulgur {
namespace {

[[noreturn]] void not_overridden(const Module& module, const char* signature) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, module.name(), " does not override ", signature,
                              "; does a member of the same name with another signature hide it?");
}

}  // namespace

Optimizers Module::configure_optimizers() { return {}; }

at::Tensor Module::training_step(const Batch&, int64_t) {
  not_overridden(*this, "at::Tensor training_step(const Batch&, int64_t)");
}

void Module::validation_step(const Batch&, int64_t) {
  not_overridden(*this, "void validation_step(const Batch&, int64_t)");
}

void Module::test_step(const Batch&, int64_t) { not_overridden(*this, "void test_step(const Batch&, int64_t)"); }

Batch Module::predict_step(const Batch&, int64_t) {
  not_overridden(*this, "Batch predict_step(const Batch&, int64_t)");
}

void Module::configure_gradient_clipping(Optimizer& optimizer, const GradientClipping& clipping) {
  clip_gradients(optimizer, clipping);
}

void Module::on_validation_model_zero_grad() { zero_grad(); }

void Module::log(std::string_view name, const at::Tensor& value, const LogOptions& options) {
  MetricLog* metrics = attached_log(name);
  if (metrics == nullptr) return;
  StepRecording* recording = StepRecording::current();
  if (recording != nullptr && (!value.defined() || value.device() != recording->device())) {
    StepRecording::refuse(
        [&] { return fmt::format("log('{}') takes a value of the host, which no replay changes", name); });
  }
  if (recording == nullptr || recording->is_rehearsal()) return metrics->log(name, value, options);
  // The step may change the tensor later, so that a copy is recorded with it.
  recording->after_each_replay(
      [this, name = std::string(name), value = value.detach().clone(), options] { log(name, value, options); });
}

void Module::log(std::string_view name, double value, const LogOptions& options) {
  MetricLog* metrics = attached_log(name);
  if (metrics == nullptr) return;
  StepRecording::refuse(
      [&] { return fmt::format("log('{}') takes a number of the host, which no replay changes", name); });
  metrics->log(name, value, options);
}

void Module::log(std::string_view name, Metric& metric, const LogOptions& options) {
  MetricLog* metrics = attached_log(name);
  if (metrics == nullptr) return;
  StepRecording::refuse([&] { return fmt::format("log('{}') takes a metric, which no replay logs", name); });
  metrics->log(name, metric, options);
}

void Module::log_histogram(std::string_view name, const at::Tensor& values) {
  if (TrainerControl* loggers = attached_loggers(name)) loggers->log_histogram(name, values);
}

void Module::log_text(std::string_view name, std::string text) {
  if (TrainerControl* loggers = attached_loggers(name)) loggers->log_text(name, std::move(text));
}

void Module::log_image(std::string_view name, const at::Tensor& pixels) {
  if (TrainerControl* loggers = attached_loggers(name)) loggers->log_image(name, pixels);
}

// Null: nobody takes a record.
TrainerControl* Module::attached_loggers(std::string_view name) {
  const bool is_attached = attached_log(name) != nullptr;
  if (!is_attached || !link_.sends_records) return nullptr;
  StepRecording::refuse([&] { return fmt::format("'{}' is sent to the loggers, which no replay does", name); });
  return link_.trainer;
}

MetricLog* Module::attached_log(std::string_view name) {
  if (link_.metrics == nullptr && !has_warned_of_log_) {
    has_warned_of_log_ = true;
    log_warning("log('{}') was called {}; values are dropped", name,
                link_.state == nullptr ? "on a module that no Trainer is running" : "in barebones mode");
  }
  return link_.metrics;
}

std::shared_ptr<Module> Module::make_another() const {
  if (make_another_) return make_another_();
  throw UsageError(
      overridden_hooks_
          ? fmt::format("strategy 'dp' needs arguments of make_module<{}>(...) that it can use again for each replica, "
                        "but they cannot be copied, or the constructor changes them; pass others, or std::ref() of "
                        "what the replicas are to share",
                        name())
          : fmt::format(
                "strategy 'dp' needs make_module<{0}>(...), which knows how to make replicas; write it in place "
                "of std::make_shared<{0}>(...)",
                name()));
}

const RunState& Module::run_state() const {
  TORCH_CHECK(link_.state != nullptr, name(), ": the run's state is known only while a Trainer runs");
  StepRecording::refuse([&] {
    return std::string("the run's state is read, such as current_epoch() or global_step(), which no replay does");
  });
  return *link_.state;
}

int64_t Module::estimated_stepping_batches() const {
  const auto steps = run_state().estimated_stepping_batches;
  if (steps) return *steps;
  throw UsageError(fmt::format(
      "{} needs to know how many steps training takes, which is known from configure_optimizers on, unless its loader "
      "does not say or nothing bounds it: set max_steps, or max_epochs and a loader that knows its length",
      name()));
}

std::string Module::name() const { return type_name(typeid(*this)); }

TrainerControl& Module::trainer(std::string_view caller) const {
  TORCH_CHECK(link_.trainer != nullptr, name(), ": ", caller, " can only be called while a Trainer runs");
  StepRecording::refuse([&] { return fmt::format("{} is called, which no replay does", caller); });
  return *link_.trainer;
}

int64_t Module::global_rank() const { return link_.trainer == nullptr ? 0 : link_.trainer->global_rank(); }
int64_t Module::world_size() const { return link_.trainer == nullptr ? 1 : link_.trainer->world_size(); }
void Module::with_evaluated_weights(const std::function<void()>& body) {
  StepRecording::refuse([&] { return std::string("with_evaluated_weights() is called, which no replay does"); });
  link_.trainer == nullptr ? body() : link_.trainer->with_evaluated_weights(body);
}
void Module::request_stop(std::string_view reason) { trainer("request_stop()").request_stop(reason); }
at::Tensor Module::all_gather(const at::Tensor& tensor) { return trainer("all_gather()").all_gather(tensor); }

const Optimizers& Module::optimizers() const { return manual_optimization("optimizers()").optimizers(); }

ManualOptimization& Module::manual_optimization(std::string_view caller) const {
  TORCH_CHECK(link_.manual_optimization != nullptr, name(), ": ", caller, " can only be called while fit runs");
  return *link_.manual_optimization;
}

ManualOptimizer Module::optimizer(size_t index) {
  ManualOptimization& manual = manual_optimization("optimizer()");
  TORCH_CHECK(!automatic_optimization, name(),
              ": optimizer() is for manual optimisation; set automatic_optimization = ", "false in the constructor");
  TORCH_CHECK_INDEX(index < manual.optimizers().size(), name(), ": optimizer(", index, "), but configure_optimizers ",
                    "returned ", manual.optimizers().size());
  return {manual, index};
}

void Module::backward(const at::Tensor& loss) { run_backward(loss); }

void Module::manual_backward(const at::Tensor& loss) {
  ManualOptimization& manual = manual_optimization("manual_backward()");
  TORCH_CHECK(!automatic_optimization, name(),
              ": manual_backward() was called, but the Trainer calls backward itself; ",
              "set automatic_optimization = false in the constructor, or return the loss");
  manual.backward(loss);
}

ScopedToggle Module::toggle_optimizer(size_t index) {
  const Optimizers& optimizers = manual_optimization("toggle_optimizer()").optimizers();
  TORCH_CHECK_INDEX(index < optimizers.size(), name(), ": toggle_optimizer(", index, "), but configure_optimizers ",
                    "returned ", optimizers.size());
  return {optimizers, index};
}

LRSchedule& Module::lr_scheduler(size_t index) {
  std::vector<LRSchedule>& schedules = manual_optimization("lr_scheduler()").lr_schedules();
  TORCH_CHECK_INDEX(index < schedules.size(), name(), ": lr_scheduler(", index, "), but configure_optimizers returned ",
                    schedules.size());
  return schedules[index];
}

void Module::clip_gradients(Optimizer& optimizer, const GradientClipping& clipping) {
  TORCH_CHECK_VALUE(!link_.clipping.active() || clipping == link_.clipping, name(),
                    "::configure_gradient_clipping clips ", "to ", clipping.value,
                    ", the Trainer's gradient_clip_val is ", link_.clipping.value,
                    "; set one of them, or make them equal");
  fulgur::clip_gradients(optimizer.params(), clipping);
}

}  // namespace fulgur
