#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/core/batch.h"
#include "fulgur/core/hook.h"
#include "fulgur/core/metric.h"
#include "fulgur/core/ranks.h"
#include "fulgur/core/run_state.h"

namespace fulgur {

// Values by name.
struct Metrics : std::map<std::string, double, std::less<>> {
  using map::map;
  double at(std::string_view name) const;  // throws UsageError with the nearest name that there is
  std::vector<std::string> names() const;
};

// How one logged value is used. Semantics of Lightning's log(); docs/differences.md has what is not the same.
struct LogOptions {
  bool prog_bar = false;                  // show it in the progress line
  bool logger = true;                     // send it to loggers (callbacks that take on_metrics)
  std::optional<bool> on_step{};          // keep each step's value; default: true in a training step, otherwise false
  std::optional<bool> on_epoch{};         // reduce over the epoch; default: false in a training step, otherwise true
  Reduction reduce_fx = Reduction::mean;  // over the epoch; a mean is weighted by batch_size
  std::optional<int64_t> batch_size{};    // weight of this value in the mean; default: the batch's size
  bool sync_dist = true;                  // reduce the epoch's value over all ranks; false: each rank keeps its own
  bool add_dataloader_idx = true;         // append /dataloader_idx_N if there are several evaluation loaders
  bool operator==(const LogOptions&) const = default;
};

// Collects what a run logs. A value on an accelerator stays there until a number is read, so that logging never waits
// for the device.
//   The same name with on_step and on_epoch becomes name_step and name_epoch for loggers; readers of callback_metrics()
//   find the plain name too (the epoch's value once there is one). The same name in two hooks is two values.
//   Where gradients are accumulated, the value of a step is the mean over its micro-batches.
// Threading: the training thread only.
class MetricLog {
 public:
  // The loops call these.
  void begin_epoch(Stage stage);                         // drops values of the stage that are not reduced yet
  void begin_step(Stage stage) { ++table(stage).step; }  // on_step values belong to a new optimizer step
  void enter(Stage stage, const Hook& hook);             // sets the running stage and hook
  const Hook& hook() const { return *hook_; }
  void set_batch(const Batch* batch) { batch_ = batch; }  // for the weight of means; borrowed until the next call
  const Batch* batch() const { return batch_; }           // null: no batch is running
  void set_dataloader(std::optional<int64_t> idx);        // nullopt: at most one evaluation loader
  std::optional<int64_t> dataloader() const { return dataloader_idx_; }
  Metrics take_step_metrics();  // the running stage's step values, for loggers

  // Reduces what the stage logged for its epoch; returns the values for loggers. Called before the epoch-end hooks, so
  // that the hooks can read the values, and again afterwards, for what the hooks logged. `ranks`: null if there is one
  // rank.
  Metrics end_epoch(Stage stage, Ranks* ranks = nullptr);

  // Throws c10::ValueError if the hook forbids logging, the value has more than one element, the name carries a
  // loader's suffix, the batch's size is needed and unknown, or the name was logged in this hook and epoch with other
  // options.
  void log(std::string_view name, const at::Tensor& value, const LogOptions& options = {});
  void log(std::string_view name, double value, const LogOptions& options = {});

  // A stateful metric of a single value: logs compute() over all ranks at the end of the epoch, then calls reset().
  // The metric is borrowed until then; the caller updates it. on_step and reduce_fx do not apply. Each stage, and each
  // of several evaluation loaders, needs a metric of its own; otherwise it throws c10::ValueError. Log it in the step
  // that updates it: a checkpoint within the epoch keeps the samples of metrics that were logged. A metric that is only
  // logged in on_train_epoch_end has, after a resume, only the samples since.
  void log(std::string_view name, Metric& metric, const LogOptions& options = {});

  // Resets the metrics that were logged by reference and not computed since, because a run has failed or was stopped:
  // the next run must not count their samples.
  void reset_metrics();

  // For the replicas of strategy dp, each of which runs a part of the batch in its own thread and logs into its own
  // MetricLog. begin_part() clears such a log, gives it the hook of `whole`, and borrows `part`, the replica's part of
  // the batch, until add_parts(). add_parts() adds the logs to this one, in the given order, as if the whole batch had
  // been logged here: means, also of on_step, weighted by batch_size, sums added up, and a Metric computed over the
  // states of all replicas that have logged it.
  void begin_part(const MetricLog& whole, const Batch& part);
  void add_parts(std::span<const MetricLog* const> parts);

  // The values that this rank has collected. load_state() acts as if they had been logged; the saved state of a Metric
  // is added when the Metric is logged next. If the options of a log() have changed since the state was saved, those of
  // its next call hold; with another reduce_fx or on_epoch the value of the epoch starts over.
  State state() const;
  void load_state(const State& state);

  // state(), and the values of the Metrics over all ranks: for a checkpoint after the last batch of a training epoch,
  // since nobody may log a Metric between load_state() and the end of that epoch. A collective call of all ranks.
  // Throws c10::ValueError if the ranks did not log the same names.
  State state_after_last_batch(Ranks& ranks) const;

  // The part of state() that an epoch in progress does not change. load_state() of this part keeps what that epoch has
  // logged.
  State state_of_ended_epochs() const;

  // Reading copies values to the host, and so waits for the device.
  Metrics callback_metrics() const;      // all values: of the last epochs, and while training of this step
  Metrics progress_bar_metrics() const;  // values logged with prog_bar
  const Metrics& logged_metrics() const { return logged_metrics_; }  // the last value of each name that loggers got
  const Metrics& epoch_metrics() const { return epoch_metrics_; }    // reduced since begin_epoch() of any stage

  // Whether the value that callback_metrics() has for `name` was reduced over an epoch, not only logged at a step:
  // epoch_metrics() then has it under this name or, if it is logged with on_step too, with the suffix _epoch.
  bool was_reduced(std::string_view name) const;

 private:
  // One number, on the host or still on a device.
  struct Scalar {
    double host = 0.0;
    at::Tensor device{};  // 0-dim, detached; undefined for a host number
    double read() const;
    Scalar times(double factor) const;
    Scalar over(double divisor) const;
    void save(State& state, const std::string& name) const;
    static Scalar saved(const State& state, const std::string& name);
    void combine(Reduction reduction, const Scalar& other);  // the mean is a sum
  };
  struct Entry {
    std::string_view hook{};
    std::string name{};     // as in log(), with the loader's suffix
    size_t given_size = 0;  // length of the name without the suffix
    std::optional<int64_t> dataloader_idx{};
    LogOptions options{};                   // on_step and on_epoch filled in
    int64_t step = -1;                      // the step of the last log(); -1: none
    Scalar step_sum{};                      // sum over the micro-batches of `step`
    int64_t step_count = 0;                 // number of values in step_sum
    Scalar reduced{};                       // sum of weighted values, or sum, min, max
    double weight = 0.0;                    // sum of weights, for the mean
    std::vector<Metric*> metrics{};         // by replica; unless empty, `reduced` is unused
    bool is_resumed = false;                // loaded, and not logged since
    MetricStates resumed{};                 // loaded states of a Metric that was not logged since
    std::optional<double> resumed_value{};  // the value of that Metric over all ranks, if it had all samples
    std::string_view given_name() const { return std::string_view(name).substr(0, given_size); }
    Scalar step_value() const;
    double epoch_value() const;
    std::optional<double> value_of_epoch(Ranks* ranks) const;
    void add_step_value(const Scalar& value, int64_t in_step);
    bool is_metric() const { return !metrics.empty() || !resumed.empty(); }
    MetricStates metric_states() const;
    static MetricStates saved_metric_states(const State& state);
    double computed(const MetricStates& states) const;
    std::optional<double> metric_value(Ranks* ranks) const;
    bool forked() const { return *options.on_step && *options.on_epoch; }
    std::string full_name(std::string_view fork) const;  // with _step or _epoch if forked, and the loader's suffix
    std::string step_name() const { return full_name("_step"); }
    std::string epoch_name() const { return full_name("_epoch"); }
    State state() const;
    void load_state(const State& state);
    void take_options(const LogOptions& now, bool is_metric);  // called by the first log() after load_state()
  };
  struct Table {
    std::vector<Entry> entries{};
    int64_t step = 0;
  };

  void add_resumed(Entry& entry, Metric& metric);
  void check_is_of_one_epoch(std::string_view name, const Metric& metric) const;
  void record(std::string_view name, const Scalar& value, const LogOptions& options);
  LogOptions resolve(std::string_view name, LogOptions options) const;
  Entry& find_or_add(std::string_view name, const LogOptions& options, bool is_metric);
  double weight_of(std::string_view name, const LogOptions& options) const;
  const Entry* find(const Entry& like) const;  // by name, hook and loader; null: none
  std::optional<Scalar> step_value_of_parts(const Entry& entry, std::span<const MetricLog* const> parts) const;
  void check_same_on_all(const std::vector<Entry>& entries, Ranks& ranks) const;
  void reduce_over_ranks(std::vector<Entry>& entries, Ranks& ranks) const;
  Table& table(Stage stage) { return tables_[static_cast<size_t>(stage)]; }
  const Table& table(Stage stage) const { return tables_[static_cast<size_t>(stage)]; }

  static constexpr Hook kNoHook{"no hook", LogScope::forbidden};
  Stage stage_ = Stage::train;
  const Hook* hook_ = &kNoHook;
  const Batch* batch_ = nullptr;
  std::optional<int64_t> dataloader_idx_{};
  std::array<Table, 4> tables_;  // by stage: validation in the middle of a training epoch must not disturb it
  Metrics callback_metrics_;
  Metrics progress_bar_metrics_;
  Metrics logged_metrics_;
  Metrics epoch_metrics_;
  std::set<std::string, std::less<>> hook_names_;  // owns the hook names of resumed entries
  std::set<const Metric*> have_resumed_;           // which have got their samples of before, whatever their names
};

}  // namespace fulgur
