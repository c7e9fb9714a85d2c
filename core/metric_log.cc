#include "core/metric_log.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

namespace fulgur {
namespace {

double identity_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::min:
      return std::numeric_limits<double>::infinity();
    case Reduction::max:
      return -std::numeric_limits<double>::infinity();
    default:
      return 0.0;
  }
}

double combine(Reduction reduction, double a, double b) {
  switch (reduction) {
    case Reduction::min:
      return b < a || b != b ? b : a;  // a NaN stays visible
    case Reduction::max:
      return b > a || b != b ? b : a;
    default:
      return a + b;
  }
}

at::Tensor combine(Reduction reduction, const at::Tensor& a, const at::Tensor& b) {
  switch (reduction) {
    case Reduction::min:
      return at::minimum(a, b);
    case Reduction::max:
      return at::maximum(a, b);
    default:
      return a.add(b);
  }
}

}  // namespace

double MetricLog::Scalar::read() const { return device.defined() ? device.item<double>() : host; }

double MetricLog::Entry::epoch_value() const {
  double value = reduced.host;
  if (reduced.device.defined()) value = combine(options.reduce_fx, value, reduced.device.item<double>());
  return options.reduce_fx == Reduction::mean ? value / weight : value;
}

void MetricLog::begin_epoch(Stage stage) { table(stage).clear(); }

void MetricLog::enter(Stage stage, LogScope scope, const Batch* batch) {
  stage_ = stage;
  scope_ = scope;
  batch_ = batch;
}

const Metrics& MetricLog::end_epoch(Stage stage) {
  epoch_metrics_.clear();
  for (const Entry& entry : table(stage)) {
    if (entry.step && stage == Stage::train) {
      callback_metrics_[entry.step_name()] = entry.step->read();
      if (entry.options.prog_bar) progress_bar_metrics_[entry.step_name()] = entry.step->read();
    }
    if (!*entry.options.on_epoch) continue;
    const double value = entry.epoch_value();
    callback_metrics_[entry.name] = callback_metrics_[entry.epoch_name()] = value;
    if (entry.options.prog_bar) progress_bar_metrics_[entry.epoch_name()] = value;
    if (entry.options.logger) epoch_metrics_[entry.epoch_name()] = value;
  }
  table(stage).clear();
  return epoch_metrics_;
}

void MetricLog::log(std::string_view name, const at::Tensor& value, const LogOptions& options) {
  TORCH_CHECK_VALUE(value.defined() && value.numel() == 1, "log('", name,
                    "') takes a number or a tensor of one element; got ",
                    value.defined() ? c10::str("a tensor of shape ", value.sizes()) : "an undefined tensor",
                    "; log its mean() or sum()");
  if (!value.is_cpu()) return record(name, {.device = value.detach().reshape({}).to(at::kFloat)}, options);
  const bool is_float = value.scalar_type() == at::kFloat;  // the usual case, without a trip through the dispatcher
  record(name, {.host = is_float ? *value.const_data_ptr<float>() : value.item().toDouble()}, options);
}

void MetricLog::log(std::string_view name, double value, const LogOptions& options) {
  record(name, {.host = value}, options);
}

void MetricLog::record(std::string_view name, Scalar value, const LogOptions& options) {
  Entry& entry = find_or_add(name, resolve(name, options));
  if (*entry.options.on_epoch) {
    const bool is_mean = options.reduce_fx == Reduction::mean;
    const double weight = is_mean ? weight_of(options) : 1.0;
    entry.weight += weight;
    if (value.device.defined()) {
      const at::Tensor weighted = value.device.mul(weight);
      at::Tensor& sum = entry.reduced.device;
      sum = sum.defined() ? combine(options.reduce_fx, sum, weighted) : weighted;
    } else {
      entry.reduced.host = combine(options.reduce_fx, entry.reduced.host, value.host * weight);
    }
  }
  if (*entry.options.on_step) entry.step = std::move(value);
}

LogOptions MetricLog::resolve(std::string_view name, LogOptions options) const {
  TORCH_CHECK_VALUE(scope_ != LogScope::forbidden, "log('", name,
                    "') cannot be called in this hook: it belongs to no step and no epoch; give the value to a logger");
  const bool in_training_step = scope_ == LogScope::training_step;
  options.on_step = options.on_step.value_or(in_training_step);
  options.on_epoch = options.on_epoch.value_or(!in_training_step);
  TORCH_CHECK_VALUE(
      scope_ != LogScope::epoch || !*options.on_step, "log('", name,
      "', {.on_step = true}) was called in a hook around an epoch, where there is no step; leave on_step out");
  TORCH_CHECK_VALUE(*options.on_step || *options.on_epoch, "log('", name,
                    "') has on_step and on_epoch false, so that nobody would see it; set one of them");
  return options;
}

MetricLog::Entry& MetricLog::find_or_add(std::string_view name, const LogOptions& options) {
  Table& entries = table(stage_);
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.name == name; });
  if (entry == entries.end()) {
    return entries.emplace_back(
        Entry{.name = std::string(name), .options = options, .reduced = {.host = identity_of(options.reduce_fx)}});
  }
  LogOptions seen = entry->options;
  seen.batch_size = options.batch_size;  // may differ from batch to batch
  TORCH_CHECK_VALUE(seen == options, "log('", name, "') was called twice in one epoch with different options; use one ",
                    "set of options, or two names");
  return *entry;
}

double MetricLog::weight_of(const LogOptions& options) const {
  if (options.batch_size) return static_cast<double>(*options.batch_size);
  return batch_ == nullptr ? 1.0 : static_cast<double>(batch_->batch_size());
}

Metrics MetricLog::callback_metrics() const {
  Metrics metrics = callback_metrics_;
  if (stage_ != Stage::train) return metrics;
  for (const Entry& entry : table(stage_)) {
    if (entry.step) metrics[entry.name] = metrics[entry.step_name()] = entry.step->read();
  }
  return metrics;
}

Metrics MetricLog::progress_bar_metrics() const {
  Metrics metrics = progress_bar_metrics_;
  for (const Entry& entry : table(Stage::train)) {
    if (entry.step && entry.options.prog_bar) metrics[entry.step_name()] = entry.step->read();
  }
  return metrics;
}

Metrics MetricLog::step_metrics() const {
  Metrics metrics;
  for (const Entry& entry : table(stage_)) {
    if (entry.step && entry.options.logger) metrics[entry.step_name()] = entry.step->read();
  }
  return metrics;
}

}  // namespace fulgur
