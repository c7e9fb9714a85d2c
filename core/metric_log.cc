#include "fulgur/core/metric_log.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"

namespace fulgur {
namespace {

constexpr std::string_view kLoaderSuffix = "/dataloader_idx_";

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

// A CPU gives 0 / 0 a sign, which would be printed: "-nan".
double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

}  // namespace

double Metrics::at(std::string_view name) const {
  if (const auto metric = find(name); metric != end()) return metric->second;
  if (empty()) throw UsageError(fmt::format("there is no metric '{}': nothing was logged", name));
  throw UsageError(unknown_name_message("metric", name, names()));
}

std::vector<std::string> Metrics::names() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : *this) names.push_back(name);
  return names;
}

double MetricLog::Scalar::read() const { return without_sign_of_nan(device.defined() ? device.item<double>() : host); }

MetricLog::Scalar MetricLog::Scalar::times(double factor) const {
  if (device.defined()) return {.device = device.mul(factor)};
  return {.host = host * factor};
}

MetricLog::Scalar MetricLog::Scalar::over(double divisor) const {
  if (device.defined()) return {.device = device.div(divisor)};
  return {.host = host / divisor};
}

void MetricLog::Scalar::combine(Reduction reduction, const Scalar& other) {
  if (!device.defined() && !other.device.defined()) {
    host = fulgur::combine(reduction, host, other.host);
    return;
  }
  const c10::Device where = (device.defined() ? device : other.device).device();
  const auto there = [&](const Scalar& scalar) {
    if (scalar.device.defined()) return scalar.device.to(where);
    return at::scalar_tensor(scalar.host, at::device(where).dtype(at::kDouble));
  };
  device = fulgur::combine(reduction, there(*this), there(other));
}

MetricLog::Scalar MetricLog::Entry::step_value() const {
  return step_count == 1 ? step_sum : step_sum.over(static_cast<double>(step_count));
}

double MetricLog::Entry::epoch_value() const {
  return without_sign_of_nan(options.reduce_fx == Reduction::mean ? reduced.read() / weight : reduced.read());
}

void MetricLog::Entry::add_step_value(const Scalar& value, int64_t in_step) {
  if (step != in_step) {
    step = in_step;
    step_sum = value;
    step_count = 1;
  } else {
    step_sum.combine(Reduction::sum, value);
    ++step_count;
  }
}

void MetricLog::Scalar::save(State& state, const std::string& name) const {
  device.defined() ? state.set(name, device) : state.set(name, host);
}

MetricLog::Scalar MetricLog::Scalar::saved(const State& state, const std::string& name) {
  const auto value = state.values().find(name);
  const bool is_tensor = value != state.values().end() && std::holds_alternative<at::Tensor>(value->second);
  if (!is_tensor) return {.host = state.get<double>(name)};
  const auto& tensor = std::get<at::Tensor>(value->second);
  if (tensor.numel() != 1) {
    throw CheckpointError(fmt::format("'{}' is one number, but has {} elements here", name, tensor.numel()));
  }
  // A checkpoint's tensors are on the CPU; a number can be added to a value on any device.
  if (tensor.is_cpu()) return {.host = tensor.item().toDouble()};
  return {.device = tensor};
}

State MetricLog::Entry::state() const {
  State state;
  state.set("hook", std::string(hook));
  state.set("name", name);
  state.set("given_size", static_cast<int64_t>(given_size));
  if (dataloader_idx) state.set("dataloader_idx", *dataloader_idx);
  state.set("prog_bar", options.prog_bar);
  state.set("logger", options.logger);
  state.set("on_step", *options.on_step);
  state.set("on_epoch", *options.on_epoch);
  state.set("reduce_fx", static_cast<int64_t>(options.reduce_fx));
  if (options.batch_size) state.set("batch_size", *options.batch_size);
  state.set("sync_dist", options.sync_dist);
  state.set("add_dataloader_idx", options.add_dataloader_idx);
  state.set("step", step);
  step_sum.save(state, "step_sum");
  state.set("step_count", step_count);
  reduced.save(state, "reduced");
  state.set("weight", weight);
  const MetricStates of_metric = metric_states();
  for (size_t i = 0; i < of_metric.size(); ++i) {
    state.set("metric/" + of_metric[i].name, of_metric[i].value);
    state.set("metric_order/" + of_metric[i].name, static_cast<int64_t>(i));
    state.set("metric_is_concatenated/" + of_metric[i].name, of_metric[i].combine == Combine::concatenate);
  }
  if (metrics.empty() && resumed_value) state.set("metric_value", *resumed_value);
  return state;
}

// Returns the states on this rank, combined over its replicas.
MetricStates MetricLog::Entry::metric_states() const {
  if (metrics.empty()) return resumed;
  std::vector<MetricStates> by_replica;
  for (const Metric* metric : metrics) by_replica.push_back(metric->states());
  return combined(by_replica);
}

void MetricLog::Entry::load_state(const State& state) {
  const auto optional = [&](std::string_view field) {
    const auto* value = state.find<int64_t>(field);
    return value == nullptr ? std::nullopt : std::optional(*value);
  };
  name = state.get<std::string>("name");
  given_size = std::min(static_cast<size_t>(state.get<int64_t>("given_size")), name.size());
  dataloader_idx = optional("dataloader_idx");
  options = {.prog_bar = state.get<bool>("prog_bar"),
             .logger = state.get<bool>("logger"),
             .on_step = state.get<bool>("on_step"),
             .on_epoch = state.get<bool>("on_epoch"),
             .reduce_fx = static_cast<Reduction>(state.get<int64_t>("reduce_fx")),
             .batch_size = optional("batch_size"),
             .sync_dist = state.get<bool>("sync_dist"),
             .add_dataloader_idx = state.get<bool>("add_dataloader_idx")};
  step = state.get<int64_t>("step");
  step_sum = Scalar::saved(state, "step_sum");
  step_count = state.get<int64_t>("step_count");
  reduced = Scalar::saved(state, "reduced");
  weight = state.get<double>("weight");
  resumed = saved_metric_states(state);
  if (const auto* value = state.find<double>("metric_value")) resumed_value = *value;
  is_resumed = true;
}

// Earlier versions of fulgur saved neither order nor kind, which are needed only on a rank that does not log the Metric
// again.
MetricStates MetricLog::Entry::saved_metric_states(const State& state) {
  const State values = state.child("metric");
  std::map<int64_t, MetricState> by_order;
  for (const auto& [name, value] : values.values()) {
    const auto* order = state.find<int64_t>("metric_order/" + name);
    const auto* is_concatenated = state.find<bool>("metric_is_concatenated/" + name);
    const bool concatenates = is_concatenated != nullptr && *is_concatenated;
    by_order.emplace(
        order == nullptr ? static_cast<int64_t>(by_order.size()) : *order,
        MetricState{name, state.get<at::Tensor>("metric/" + name), concatenates ? Combine::concatenate : Combine::sum});
  }
  MetricStates states;
  for (auto& [order, of_metric] : by_order) states.push_back(std::move(of_metric));
  return states;
}

// What was collected with the options before stays if it means the same.
void MetricLog::Entry::take_options(const LogOptions& now, bool is_metric) {
  is_resumed = false;
  const bool has_same_meaning =
      now.reduce_fx == options.reduce_fx && now.on_epoch == options.on_epoch && is_metric == !resumed.empty();
  options = now;
  if (!has_same_meaning) {
    reduced = {.host = identity_of(now.reduce_fx)};
    weight = 0.0;
    resumed = {};
    resumed_value.reset();
  }
  if (!*now.on_step) {
    step_sum = {};
    step_count = 0;
  }
}

// A Metric that is logged under several names was saved under each of them.
void MetricLog::add_resumed(Entry& entry, Metric& metric) {
  if (entry.resumed.empty()) return;
  const MetricStates resumed = std::exchange(entry.resumed, {});
  entry.resumed_value.reset();
  if (!have_resumed_.insert(&metric).second) return;
  MetricStates since = metric.states(), before = since;
  for (MetricState& of_metric : before) {
    const auto saved = std::ranges::find(resumed, of_metric.name, &MetricState::name);
    if (saved == resumed.end()) {
      throw CheckpointError(fmt::format("'{}': the checkpoint has no state '{}' of its Metric; was it another one?",
                                        entry.name, of_metric.name));
    }
    of_metric.value = saved->value;
  }
  metric.set_states(combined(std::array{before, since}));
}

State MetricLog::state_of_ended_epochs() const {
  State state;
  const auto add = [&](const std::string& what, const Metrics& metrics) {
    for (const auto& [name, value] : metrics) state.set(fmt::format("{}/{}", what, name), value);
  };
  add("callback_metrics", callback_metrics_);
  add("progress_bar_metrics", progress_bar_metrics_);
  add("logged_metrics", logged_metrics_);
  add("epoch_metrics", epoch_metrics_);
  return state;
}

State MetricLog::state() const {
  State state = state_of_ended_epochs();
  const Table& training = table(Stage::train);
  state.set("step", training.step);
  state.set("num_entries", static_cast<int64_t>(training.entries.size()));
  for (size_t i = 0; i < training.entries.size(); ++i) {
    state.set_child(fmt::format("entries/{}", i), training.entries[i].state());
  }
  return state;
}

State MetricLog::state_after_last_batch(Ranks& ranks) const {
  State state = this->state();
  const std::vector<Entry>& entries = table(Stage::train).entries;
  if (ranks.world_size() > 1) check_same_on_all(entries, ranks);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].is_metric()) continue;
    const std::optional<double> value = entries[i].metric_value(&ranks);
    if (value) state.set(fmt::format("entries/{}/metric_value", i), *value);
  }
  return state;
}

void MetricLog::load_state(const State& state) {
  const auto load = [&](const std::string& what, Metrics& metrics) {
    metrics.clear();
    const State saved = state.child(what);
    for (const auto& [name, value] : saved.values()) metrics[name] = saved.get<double>(name);
  };
  load("callback_metrics", callback_metrics_);
  load("progress_bar_metrics", progress_bar_metrics_);
  load("logged_metrics", logged_metrics_);
  load("epoch_metrics", epoch_metrics_);
  const auto* num_entries = state.find<int64_t>("num_entries");
  if (num_entries == nullptr) return;  // metrics of ended epochs only
  Table& training = table(Stage::train);
  training.step = state.get<int64_t>("step");
  for (const Entry& entry : training.entries) {  // their samples are in the state
    for (Metric* metric : entry.metrics) metric->reset();
  }
  training.entries.clear();
  have_resumed_.clear();
  for (int64_t i = 0; i < *num_entries; ++i) {
    const State saved = state.child(fmt::format("entries/{}", i));
    Entry& entry = training.entries.emplace_back();
    entry.load_state(saved);
    entry.hook = *hook_names_.insert(saved.get<std::string>("hook")).first;
  }
}

double MetricLog::Entry::computed(const MetricStates& states) const {
  const at::Tensor value = metrics.front()->compute(states);
  TORCH_CHECK_VALUE(
      value.numel() == 1, "log('", name, "', metric) takes a metric of a single value; its value has shape ",
      value.sizes(),
      "; compute() it at the end of the epoch, combine the ranks' by all_gather(), and log its elements by names of "
      "their own");
  return without_sign_of_nan(value.item<double>());
}

// nullopt: the Metric was not logged since load_state(), and the state was saved before it had all samples. A rank that
// has not logged it takes part with what it has saved, and gets the value from the others.
std::optional<double> MetricLog::Entry::metric_value(Ranks* ranks) const {
  const bool is_over_ranks = ranks != nullptr && ranks->world_size() > 1 && options.sync_dist;
  const bool is_here = !metrics.empty();
  if (!is_over_ranks) return is_here ? std::optional(computed(metric_states())) : resumed_value;
  const auto rank = static_cast<double>(ranks->rank()), nobody = static_cast<double>(ranks->world_size());
  double computes = is_here ? rank : nobody;  // the first rank that has it
  ranks->all_reduce({&computes, 1}, Reduction::min);
  if (computes == nobody) return resumed_value;
  const MetricStates states = ranks->combine(metric_states());
  const double own = is_here ? computed(states) : 0.0;  // throws on every rank that has it
  double value = rank == computes ? own : 0.0;
  ranks->all_reduce({&value, 1}, Reduction::sum);
  return value;
}

std::optional<double> MetricLog::Entry::value_of_epoch(Ranks* ranks) const {
  return is_metric() ? metric_value(ranks) : epoch_value();
}

std::string MetricLog::Entry::full_name(std::string_view fork) const {
  if (!forked()) return name;
  return std::string(given_name()).append(fork).append(name, given_size);
}

void MetricLog::begin_epoch(Stage stage) {
  table(stage).entries.clear();
  epoch_metrics_.clear();
  begin_step(stage);
}

void MetricLog::enter(Stage stage, const Hook& hook) {
  stage_ = stage;
  hook_ = &hook;
}

void MetricLog::set_dataloader(std::optional<int64_t> idx) { dataloader_idx_ = idx; }

Metrics MetricLog::take_step_metrics() {
  Metrics metrics;
  for (const Entry& entry : table(stage_).entries) {
    if (entry.step == table(stage_).step && entry.options.logger)
      metrics[entry.step_name()] = entry.step_value().read();
  }
  for (const auto& [name, value] : metrics) logged_metrics_[name] = value;
  return metrics;
}

Metrics MetricLog::end_epoch(Stage stage, Ranks* ranks) {
  Metrics for_loggers;
  if (ranks != nullptr) reduce_over_ranks(table(stage).entries, *ranks);
  for (const Entry& entry : table(stage).entries) {
    if (entry.step_count > 0 && stage == Stage::train) {
      callback_metrics_[entry.step_name()] = entry.step_value().read();
      if (entry.options.prog_bar) progress_bar_metrics_[entry.step_name()] = entry.step_value().read();
    }
    const std::optional<double> value = *entry.options.on_epoch ? entry.value_of_epoch(ranks) : std::nullopt;
    if (!value) continue;
    callback_metrics_[entry.name] = callback_metrics_[entry.epoch_name()] = *value;
    if (entry.options.prog_bar) progress_bar_metrics_[entry.epoch_name()] = *value;
    epoch_metrics_[entry.epoch_name()] = *value;
    if (entry.options.logger) for_loggers[entry.epoch_name()] = logged_metrics_[entry.epoch_name()] = *value;
  }
  for (const Entry& entry : table(stage).entries) {  // only now: one metric may be logged under several names
    for (Metric* metric : entry.metrics) metric->reset();
  }
  table(stage).entries.clear();
  return for_loggers;
}

void MetricLog::reset_metrics() {
  for (Table& of_stage : tables_) {
    for (Entry& entry : of_stage.entries) {
      for (Metric* metric : entry.metrics) metric->reset();
      entry.metrics.clear();
    }
  }
}

// Throws on every rank if the ranks did not log the same names.
void MetricLog::check_same_on_all(const std::vector<Entry>& entries, Ranks& ranks) const {
  std::vector<std::string> logged;
  for (const Entry& entry : entries) {
    if (*entry.options.on_epoch && entry.options.sync_dist) {
      logged.push_back(fmt::format("'{}' in {}", entry.name, entry.hook));
    }
  }
  const auto or_nothing = [](const std::string& text) { return text.empty() ? "nothing" : text; };
  const std::vector<std::string> by_rank = ranks.all_gather(fmt::format("{}", fmt::join(logged, ", ")));
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    TORCH_CHECK_VALUE(by_rank[rank] == by_rank[0], "epoch values are reduced over ranks, but rank 0 logged ",
                      or_nothing(by_rank[0]), " and rank ", rank, " logged ", or_nothing(by_rank[rank]),
                      "; log the same in the same order on every rank, or with sync_dist = false");
  }
}

// One call for each kind of reduction. A mean travels as its two sums, so that it is the mean over all samples.
void MetricLog::reduce_over_ranks(std::vector<Entry>& entries, Ranks& ranks) const {
  if (ranks.world_size() == 1) return;
  check_same_on_all(entries, ranks);
  for (const Reduction reduction : {Reduction::sum, Reduction::min, Reduction::max}) {
    std::vector<double> values;
    std::vector<Entry*> owners;
    for (Entry& entry : entries) {
      const bool is_sum = entry.options.reduce_fx == Reduction::mean || entry.options.reduce_fx == Reduction::sum;
      const Reduction kind = is_sum ? Reduction::sum : entry.options.reduce_fx;
      if (!*entry.options.on_epoch || !entry.options.sync_dist || kind != reduction) continue;
      if (entry.is_metric()) continue;
      entry.reduced = {.host = entry.reduced.read()};
      owners.push_back(&entry);
      values.push_back(entry.reduced.host);
      if (is_sum) values.push_back(entry.weight);
    }
    if (owners.empty()) continue;
    ranks.all_reduce(values, reduction);
    auto value = values.begin();
    for (Entry* entry : owners) {
      entry->reduced.host = *value++;
      if (reduction == Reduction::sum) entry->weight = *value++;
    }
  }
}

void MetricLog::log(std::string_view name, const at::Tensor& value, const LogOptions& options) {
  TORCH_CHECK_VALUE(value.defined() && value.numel() == 1, "log('", name,
                    "') takes a number or a tensor of one element; got ",
                    value.defined() ? c10::str("a tensor of shape ", value.sizes()) : "an undefined tensor",
                    "; log its mean() or sum()");
  if (!value.is_cpu()) {  // a copy, since the caller may change the tensor later
    return record(name, {.device = value.detach().reshape({}).to(at::kDouble, /*non_blocking=*/false, /*copy=*/true)},
                  options);
  }
  const bool is_float = value.scalar_type() == at::kFloat;  // the usual case, without a trip through the dispatcher
  record(name, {.host = is_float ? *value.const_data_ptr<float>() : value.item().toDouble()}, options);
}

void MetricLog::log(std::string_view name, double value, const LogOptions& options) {
  record(name, {.host = value}, options);
}

void MetricLog::log(std::string_view name, Metric& metric, const LogOptions& options) {
  TORCH_CHECK_VALUE(!options.on_step.value_or(false) && options.on_epoch.value_or(true), "log('", name,
                    "', metric) gives the metric's value at the end of the epoch; leave on_step and on_epoch out");
  LogOptions by_epoch = options;
  by_epoch.on_step = false;
  by_epoch.on_epoch = true;
  check_is_of_one_epoch(name, metric);
  Entry& entry = find_or_add(name, resolve(name, by_epoch), /*is_metric=*/true);
  add_resumed(entry, metric);
  entry.metrics = {&metric};
}

// A metric is computed and reset at the end of each stage, with the samples that it got in all of them.
void MetricLog::check_is_of_one_epoch(std::string_view name, const Metric& metric) const {
  for (const Table& of_stage : tables_) {
    for (const Entry& entry : of_stage.entries) {
      const bool is_same_loader = &of_stage == &table(stage_) && (entry.dataloader_idx == dataloader_idx_ ||
                                                                  hook_->scope != LogScope::evaluation_step);
      if (is_same_loader || std::ranges::find(entry.metrics, &metric) == entry.metrics.end()) continue;
      TORCH_CHECK_VALUE(false, "log('", name, "', metric): this metric is logged as '", entry.name, "' in ", entry.hook,
                        " as well, for ", &of_stage == &table(stage_) ? "another loader" : "another stage",
                        ", and would mix the samples of both; keep a metric for each");
    }
  }
}

void MetricLog::record(std::string_view name, const Scalar& value, const LogOptions& options) {
  Entry& entry = find_or_add(name, resolve(name, options), /*is_metric=*/false);
  if (*entry.options.on_epoch) {
    const bool is_mean = options.reduce_fx == Reduction::mean;
    const double weight = is_mean ? weight_of(name, options) : 1.0;
    entry.weight += weight;
    entry.reduced.combine(options.reduce_fx, value.times(weight));
  }
  if (*entry.options.on_step) entry.add_step_value(value, table(stage_).step);
}

void MetricLog::begin_part(const MetricLog& whole, const Batch& part) {
  enter(whole.stage_, whole.hook());
  set_dataloader(whole.dataloader_idx_);
  set_batch(&part);
  table(stage_) = {};
}

void MetricLog::add_parts(std::span<const MetricLog* const> parts) {
  for (const MetricLog* part : parts) {
    for (const Entry& logged : part->table(stage_).entries) {
      Entry& entry = find_or_add(logged.given_name(), logged.options, !logged.metrics.empty());
      entry.weight += logged.weight;
      entry.reduced.combine(entry.options.reduce_fx, logged.reduced);
      for (Metric* metric : logged.metrics) {
        if (std::ranges::find(entry.metrics, metric) != entry.metrics.end()) continue;
        add_resumed(entry, *metric);
        entry.metrics.push_back(metric);
      }
    }
  }
  for (Entry& entry : table(stage_).entries) {
    if (const auto value = step_value_of_parts(entry, parts)) entry.add_step_value(*value, table(stage_).step);
  }
}

std::optional<MetricLog::Scalar> MetricLog::step_value_of_parts(const Entry& entry,
                                                                std::span<const MetricLog* const> parts) const {
  const Reduction reduction = entry.options.reduce_fx;
  Scalar value{.host = identity_of(reduction)};
  double sum_of_weights = 0.0;
  for (const MetricLog* part : parts) {
    const Entry* logged = part->find(entry);
    if (logged == nullptr || logged->step_count == 0) continue;
    const bool is_mean = reduction == Reduction::mean;
    const double weight = is_mean ? part->weight_of(entry.given_name(), logged->options) : 1.0;
    value.combine(reduction, logged->step_value().times(weight));
    sum_of_weights += weight;
  }
  if (sum_of_weights == 0.0) return std::nullopt;
  return reduction == Reduction::mean ? value.over(sum_of_weights) : value;
}

const MetricLog::Entry* MetricLog::find(const Entry& like) const {
  const auto& entries = table(stage_).entries;
  const auto entry = std::ranges::find_if(entries, [&](const Entry& e) {
    return e.name == like.name && e.hook == like.hook && e.dataloader_idx == like.dataloader_idx;
  });
  return entry == entries.end() ? nullptr : &*entry;
}

LogOptions MetricLog::resolve(std::string_view name, LogOptions options) const {
  TORCH_CHECK_VALUE(hook_->scope != LogScope::forbidden, "log('", name, "') cannot be called in ", hook_->name,
                    ", which belongs to no step and no epoch; give the value to a logger instead");
  TORCH_CHECK_VALUE(name.find(kLoaderSuffix) == std::string_view::npos, "log('", name, "'): '", kLoaderSuffix,
                    "N' is appended where there are several loaders; choose a name without it");
  const bool in_training_step = hook_->scope == LogScope::training_step;
  options.on_step = options.on_step.value_or(in_training_step);
  options.on_epoch = options.on_epoch.value_or(!in_training_step);
  TORCH_CHECK_VALUE(hook_->scope != LogScope::epoch || !*options.on_step, "log('", name,
                    "', {.on_step = true}) was called in ", hook_->name,
                    ", where there is no step; leave on_step out, or set it to false");
  TORCH_CHECK_VALUE(*options.on_step || *options.on_epoch, "log('", name,
                    "') has on_step and on_epoch false, so that the value would go nowhere; set one of them");
  return options;
}

MetricLog::Entry& MetricLog::find_or_add(std::string_view name, const LogOptions& options, bool is_metric) {
  const bool of_a_loader = hook_->scope == LogScope::evaluation_step && dataloader_idx_.has_value();
  const std::optional<int64_t> idx = of_a_loader ? dataloader_idx_ : std::nullopt;
  std::vector<Entry>& entries = table(stage_).entries;
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) {
    return e.given_name() == name && e.hook == hook_->name && e.dataloader_idx == idx;
  });
  if (entry == entries.end()) {
    std::string full_name(name);
    if (idx && options.add_dataloader_idx) full_name += c10::str(kLoaderSuffix, *idx);
    TORCH_CHECK_VALUE(!idx || options.add_dataloader_idx ||
                          std::ranges::none_of(
                              entries, [&](const Entry& e) { return e.name == full_name && e.dataloader_idx != idx; }),
                      "log('", name,
                      "', {.add_dataloader_idx = false}) was called for several loaders; give each loader's ",
                      "value a name of its own, or leave add_dataloader_idx out");
    Entry& added = entries.emplace_back();
    added.hook = hook_->name;
    added.name = std::move(full_name);
    added.dataloader_idx = idx;
    added.options = options;
    added.reduced.host = identity_of(options.reduce_fx);
    added.given_size = name.size();
    return added;
  }
  if (entry->is_resumed) entry->take_options(options, is_metric);
  LogOptions seen = entry->options;
  seen.batch_size = options.batch_size;  // may differ from batch to batch
  TORCH_CHECK_VALUE(seen == options, "log('", name, "') was called twice in ", hook_->name,
                    " with different options; use one set of options, or two names");
  return *entry;
}

double MetricLog::weight_of(std::string_view name, const LogOptions& options) const {
  if (options.batch_size) return static_cast<double>(*options.batch_size);
  if (batch_ == nullptr) return 1.0;
  try {
    return static_cast<double>(batch_->batch_size());
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "log('", name,
                      "') needs the batch's size for the mean over the epoch: ", error.what_without_backtrace(),
                      "; pass {.batch_size = ...}");
  }
}

bool MetricLog::was_reduced(std::string_view name) const {
  const size_t end = std::min(name.find(kLoaderSuffix), name.size());
  const std::string forked = fmt::format("{}_epoch{}", name.substr(0, end), name.substr(end));
  return epoch_metrics_.contains(name) || epoch_metrics_.contains(forked);
}

Metrics MetricLog::callback_metrics() const {
  Metrics steps;
  Metrics known = callback_metrics_;
  for (const Entry& entry : table(Stage::train).entries) {
    if (entry.step_count > 0) steps[entry.name] = steps[entry.step_name()] = entry.step_value().read();
  }
  if (stage_ != Stage::train) {  // names that training shares with validation show the value of the running stage
    known.merge(steps);
    return known;
  }
  steps.merge(known);
  return steps;
}

Metrics MetricLog::progress_bar_metrics() const {
  Metrics metrics = progress_bar_metrics_;
  for (const Entry& entry : table(Stage::train).entries) {
    if (entry.step_count > 0 && entry.options.prog_bar) metrics[entry.step_name()] = entry.step_value().read();
  }
  return metrics;
}

}  // namespace fulgur
