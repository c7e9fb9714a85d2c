#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/run_state.h"

namespace fulgur {

using Metrics = std::map<std::string, double, std::less<>>;

enum class Reduction { mean, sum, min, max };

// How one logged value is used. Semantics of Lightning's log().
struct LogOptions {
  bool prog_bar = false;                  // show it in the progress line
  bool logger = true;                     // send it to loggers (callbacks that take on_metrics)
  std::optional<bool> on_step{};          // keep each value; default: true in a training step, else false
  std::optional<bool> on_epoch{};         // reduce over the epoch; default: false in a training step, else true
  Reduction reduce_fx = Reduction::mean;  // over the epoch; the mean is weighted by batch_size
  std::optional<int64_t> batch_size{};    // weight of this value in the mean; default: the batch's size
  bool operator==(const LogOptions&) const = default;
};

// What log() may do where the training thread is now.
enum class LogScope {
  forbidden,        // setup, teardown, checkpoint and predict hooks: log() throws
  training_step,    // training_step and the hooks around one training batch
  evaluation_step,  // validation_step, test_step and the hooks around one batch of theirs
  epoch,            // hooks around an epoch: only on_epoch
};

// Collects what a run logs. A value on an accelerator stays there, unread, until somebody asks for a number; so logging
// never makes the device wait.
//   The same name with on_step and on_epoch becomes name_step and name_epoch for loggers; readers of callback_metrics()
//   find the plain name too (the epoch's value once there is one).
// Threading: the training thread only.
class MetricLog {
 public:
  // The loops call these.
  void begin_epoch(Stage stage);  // forgets what that stage logged and did not reduce
  // What comes next, until the following enter(). `batch`, borrowed for that long, gives means their weight.
  void enter(Stage stage, LogScope scope, const Batch* batch = nullptr);
  const Metrics& end_epoch(Stage stage);  // reduces the epoch's values, for callbacks; returns those for loggers

  // Throws c10::ValueError if the scope forbids it, the value has more than one element, or the name was logged in this
  // epoch with other options.
  void log(std::string_view name, const at::Tensor& value, const LogOptions& options = {});
  void log(std::string_view name, double value, const LogOptions& options = {});

  // Reading makes numbers of device values, and so waits for the device.
  Metrics callback_metrics() const;      // everything known: the last epoch's values, and this step's while training
  Metrics progress_bar_metrics() const;  // those logged with prog_bar
  Metrics step_metrics() const;          // the running stage's step values for loggers
  const Metrics& epoch_metrics() const { return epoch_metrics_; }  // what the last end_epoch() returned

 private:
  // One number on its way to being read: on the host, or still on a device.
  struct Scalar {
    double host = 0.0;
    at::Tensor device{};  // 0-dim, detached; undefined for a host number
    double read() const;
  };
  struct Entry {
    std::string name;
    LogOptions options;  // on_step and on_epoch filled in
    std::optional<Scalar> step{};
    Scalar reduced{};  // sum of weighted values, or sum, min, max
    double weight = 0.0;
    // Logged with on_step and on_epoch, so each needs a name of its own.
    bool forked() const { return *options.on_step && *options.on_epoch; }
    std::string step_name() const { return forked() ? name + "_step" : name; }
    std::string epoch_name() const { return forked() ? name + "_epoch" : name; }
    double epoch_value() const;
  };
  using Table = std::vector<Entry>;

  void record(std::string_view name, Scalar value, const LogOptions& options);
  LogOptions resolve(std::string_view name, LogOptions options) const;
  Entry& find_or_add(std::string_view name, const LogOptions& options);
  double weight_of(const LogOptions& options) const;
  Table& table(Stage stage) { return tables_[static_cast<size_t>(stage)]; }
  const Table& table(Stage stage) const { return tables_[static_cast<size_t>(stage)]; }

  Stage stage_ = Stage::train;
  LogScope scope_ = LogScope::forbidden;
  const Batch* batch_ = nullptr;
  std::array<Table, 4> tables_;  // by stage: validation in the middle of a training epoch must not disturb it
  Metrics callback_metrics_;
  Metrics progress_bar_metrics_;
  Metrics epoch_metrics_;
};

}  // namespace fulgur
