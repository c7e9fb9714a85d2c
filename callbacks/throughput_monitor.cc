#include "fulgur/callbacks/throughput_monitor.h"

#include <utility>

namespace fulgur {

void ThroughputMonitorOptions::describe(FieldVisitor& visit) {
  visit({.name = "flops_per_sample", .help = "floating-point operations for a sample, forward and backward", .min = 0},
        &flops_per_sample);
  visit({.name = "peak_flops",
         .help = "floating-point operations per second that one rank can do (with dp: all its devices)",
         .min = 0},
        &peak_flops);
  visit({.name = "window_size", .help = "batches over which the rates are taken", .min = 1}, &window_size);
}

ThroughputMonitor::ThroughputMonitor(Options options) : options_(std::move(options)) {
  check_fields("ThroughputMonitor", options_);
}

std::shared_ptr<ThroughputMonitor> ThroughputMonitor::make(Options options) {
  return std::make_shared<ThroughputMonitor>(std::move(options));
}

void ThroughputMonitor::Count::add(const Count& other, double sign) {
  seconds += sign * other.seconds;
  waited_s += sign * other.waited_s;
  batches += sign * other.batches;
  samples += sign * other.samples;
  items += sign * other.items;
}

void ThroughputMonitor::on_fit_start(TrainerControl&) {
  last_.clear();
  window_ = all_ = {};
  is_first_ = true;
  paused_.reset();
}

void ThroughputMonitor::on_train_epoch_start(TrainerControl& trainer) {
  begin_ = Clock::now();
  waited_before_s_ = trainer.state().data_wait_s;
}

void ThroughputMonitor::on_validation_start(TrainerControl&) { paused_ = Clock::now(); }

void ThroughputMonitor::on_validation_end(TrainerControl&) {
  if (paused_) begin_ += Clock::now() - *paused_;
  paused_.reset();
}

void ThroughputMonitor::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch& batch, int64_t) {
  const Count count = measure(trainer, batch);
  if (std::exchange(is_first_, false)) return;
  last_.push_back(count);
  window_.add(count);
  all_.add(count);
  if (std::ssize(last_) > options_.window_size) {
    window_.add(last_.front(), -1.0);
    last_.pop_front();
  }
  log(trainer);
}

ThroughputMonitor::Count ThroughputMonitor::measure(TrainerControl& trainer, const Batch& batch) {
  const auto now = Clock::now();
  const double waited_s = trainer.state().data_wait_s;
  const auto ranks = static_cast<double>(trainer.world_size());
  const int64_t samples = options_.num_samples ? options_.num_samples(batch) : batch.batch_size();
  const int64_t items = options_.num_items ? options_.num_items(batch) : 0;
  return {.seconds = std::chrono::duration<double>(now - std::exchange(begin_, now)).count(),
          .waited_s = waited_s - std::exchange(waited_before_s_, waited_s),
          .batches = ranks,
          .samples = ranks * static_cast<double>(samples),
          .items = ranks * static_cast<double>(items)};
}

void ThroughputMonitor::log(TrainerControl& trainer) const {
  const auto log = [&](std::string_view name, double value) {
    trainer.metrics().log(name, value, {.on_step = true, .on_epoch = false, .batch_size = 1});
  };
  log("train/batches_per_sec", window_.rate(window_.batches));
  log("train/samples_per_sec", window_.rate(window_.samples));
  if (options_.num_items) log("train/items_per_sec", window_.rate(window_.items));
  const double flops_per_s = window_.rate(window_.samples) * options_.flops_per_sample;
  if (flops_per_s > 0) log("train/flops_per_sec", flops_per_s);
  const double peak = options_.peak_flops * static_cast<double>(trainer.world_size());
  if (flops_per_s > 0 && peak > 0) log("train/mfu", flops_per_s / peak);
  log("train/data_wait", window_.rate(window_.waited_s));
}

}  // namespace fulgur
