#include "fulgur/callbacks/kineto_profiler.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "fulgur/base/first_error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/trace.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/numbered_files.h"

namespace fulgur {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

const std::unordered_set<at::RecordScope> kScopes{at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                                                  at::RecordScope::USER_SCOPE};

std::atomic<bool> is_recording = false;  // torch records one fit of a process at a time

std::set<ActivityType> activities_of(c10::Device device) {
  std::set<ActivityType> activities{ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  return activities;
}

// Turns fulgur's spans into events of torch's profiler, which enclose the operators.
class SpanEvents final : public trace::Observer {
 public:
  SpanEvents() { trace::set_observer(this); }
  ~SpanEvents() override {
    trace::set_observer(nullptr);
    while (!open_.empty()) open_.pop_back();  // the innermost first
  }
  SpanEvents(const SpanEvents&) = delete;
  SpanEvents& operator=(const SpanEvents&) = delete;

  void begin(std::string_view name) override {
    open_.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
    if (open_.back()->isActive()) open_.back()->before(std::string(name));
  }
  void end() override { open_.pop_back(); }

 private:
  std::vector<std::unique_ptr<at::RecordFunction>> open_;
};

struct Row {
  int64_t calls = 0;
  double total_us = 0.0, self_us = 0.0, device_us = 0.0;
};

// The rows by name. The self time of an event leaves out the events within it on the same thread.
std::map<std::string, Row> rows_of(const std::vector<kineto::KinetoEvent>& events) {
  std::map<std::string, Row> rows;
  std::map<uint64_t, std::vector<const kineto::KinetoEvent*>> by_thread;
  for (const kineto::KinetoEvent& event : events) {
    const double us = 1e-3 * static_cast<double>(event.durationNs());
    if (event.deviceType() != c10::kCPU) {
      Row& row = rows[event.name()];
      ++row.calls;
      row.device_us += us;
    } else if (!event.isAsync()) {
      by_thread[event.startThreadId()].push_back(&event);
    }
  }
  for (auto& [thread, own] : by_thread) {
    std::ranges::sort(own, [](const auto* a, const auto* b) {
      return std::pair(a->startNs(), b->endNs()) < std::pair(b->startNs(), a->endNs());  // the outer one first
    });
    std::vector<std::pair<const kineto::KinetoEvent*, Row*>> around;  // the events that the next one may lie in
    for (const kineto::KinetoEvent* event : own) {
      while (!around.empty() && around.back().first->endNs() <= event->startNs()) around.pop_back();
      const double us = 1e-3 * static_cast<double>(event->durationNs());
      Row& row = rows[event->name()];
      ++row.calls;
      row.total_us += us;
      row.self_us += us;
      if (!around.empty()) around.back().second->self_us -= us;
      around.emplace_back(event, &row);
    }
  }
  return rows;
}

std::string table_of(const std::vector<kineto::KinetoEvent>& events, int64_t num_rows, int64_t num_batches) {
  const std::map<std::string, Row> rows = rows_of(events);
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::ranges::stable_sort(sorted, [](const auto& a, const auto& b) {
    return a.second.self_us + a.second.device_us > b.second.self_us + b.second.device_us;
  });
  double whole = 0.0;
  for (const auto& [name, row] : sorted) whole += row.self_us + row.device_us;
  const bool has_device = std::ranges::any_of(sorted, [](const auto& item) { return item.second.device_us > 0; });
  std::string table = fmt::format("{:>7} {:>9} {:>12} {:>12}{}  of {} batches\n", "share", "calls", "self ms",
                                  "total ms", has_device ? fmt::format(" {:>12}", "device ms") : "", num_batches);
  for (size_t i = 0; i < std::min(sorted.size(), static_cast<size_t>(num_rows)); ++i) {
    const auto& [name, row] = sorted[i];
    table += fmt::format("{:6.1f}% {:>9} {:>12.3f} {:>12.3f}{}  {}\n", 100 * (row.self_us + row.device_us) / whole,
                         row.calls, 1e-3 * row.self_us, 1e-3 * row.total_us,
                         has_device ? fmt::format(" {:>12.3f}", 1e-3 * row.device_us) : "", name);
  }
  return table;
}

}  // namespace

void KinetoProfilerOptions::describe(FieldVisitor& visit) {
  visit({.name = "wait_batches", .help = "training batches that are left alone", .min = 0}, &wait_batches);
  visit({.name = "warmup_batches", .help = "training batches during which the profiler is being prepared", .min = 0},
        &warmup_batches);
  visit({.name = "active_batches", .help = "training batches that are recorded", .min = 1}, &active_batches);
  visit({.name = "table_rows", .help = "number of operators in the table", .min = 0}, &table_rows);
}

// torch records from begin() to finish().
class KinetoProfiler::Recording {
 public:
  explicit Recording(c10::Device device)
      : device_(device),
        config_(ProfilerState::KINETO, /*report_input_shapes=*/true),
        activities_(activities_of(device)) {
    kineto::prepareProfiler(config_, activities_);
  }
  ~Recording() {
    FirstError error;
    error.run([&] {
      if (is_prepared_ && !has_begun()) begin();  // torch cannot stop a profiler that is only prepared
      if (is_prepared_) finish();
    });
    error.warn("torch's profiler");
    is_recording = false;
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void begin() {
    kineto::enableProfiler(config_, activities_, kScopes);
    spans_ = std::make_unique<SpanEvents>();
  }
  bool has_begun() const { return spans_ != nullptr; }
  std::unique_ptr<kineto::ProfilerResult> finish() {
    is_prepared_ = false;
    spans_.reset();
    FirstError error;
    error.run([&] {  // what is still queued would be missing in the trace
      if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    });
    auto result = kineto::disableProfiler();
    error.rethrow();
    return result;
  }

 private:
  const c10::Device device_;
  const ProfilerConfig config_;
  const std::set<ActivityType> activities_;
  bool is_prepared_ = true;  // until finish()
  std::unique_ptr<SpanEvents> spans_;
};

KinetoProfiler::KinetoProfiler(Options options) : options_(options) { check_fields("KinetoProfiler", options_); }

KinetoProfiler::~KinetoProfiler() = default;

std::shared_ptr<KinetoProfiler> KinetoProfiler::make(Options options) {
  return std::make_shared<KinetoProfiler>(options);
}

void KinetoProfiler::on_train_start(TrainerControl&) {
  num_batches_ = 0;
  has_written_ = false;
}

BatchAction KinetoProfiler::on_train_batch_start(TrainerControl& trainer, const Batch&, int64_t) {
  if (has_written_) return BatchAction::run;
  if (num_batches_ == options_.wait_batches && recording_ == nullptr) {
    if (is_recording.exchange(true)) {
      has_written_ = true;
      log_warning("KinetoProfiler: another fit of this process is being recorded, so that this one is not");
      return BatchAction::run;
    }
    recording_ = std::make_unique<Recording>(trainer.device());
  }
  const bool begins = num_batches_ == options_.wait_batches + options_.warmup_batches;
  if (begins && !recording_->has_begun()) recording_->begin();  // another callback may have skipped the batch
  return BatchAction::run;
}

void KinetoProfiler::on_train_batch_end(TrainerControl& trainer, const at::Tensor&, const Batch&, int64_t) {
  const bool is_last = ++num_batches_ == options_.wait_batches + options_.warmup_batches + options_.active_batches;
  if (is_last && recording_ != nullptr) write(trainer);
}

void KinetoProfiler::on_train_end(TrainerControl& trainer) {
  if (recording_ != nullptr && recording_->has_begun()) return write(trainer);
  if (has_written_ || !trainer.is_global_zero()) return;
  log_warning(
      "KinetoProfiler has recorded nothing: fit ended after {} batches, and recording begins after {}; set "
      "wait_batches and warmup_batches lower",
      num_batches_, options_.wait_batches + options_.warmup_batches);
}

void KinetoProfiler::teardown(TrainerControl&, EntryPoint) { recording_.reset(); }

void KinetoProfiler::write(TrainerControl& trainer) {
  const auto result = std::exchange(recording_, nullptr)->finish();
  has_written_ = true;
  const std::string name = fmt::format("trace-rank{}", trainer.global_rank());
  const std::filesystem::path trace = next_numbered(trainer.run_dir(), name, ".json");
  result->save(trace.string());
  if (!trainer.is_global_zero()) return;
  const int64_t num_batches = num_batches_ - options_.wait_batches - options_.warmup_batches;
  const std::string table = table_of(result->events(), options_.table_rows, num_batches);
  fmt::print("{}", table);
  std::fflush(stdout);
  replace_file_atomically(std::filesystem::path(trace).replace_extension(".txt"),
                          [&](FileWriter& file) { file.write(table.data(), table.size()); });
  if (!std::filesystem::exists(trace)) log_warning("torch's profiler could not write '{}'", trace.string());
}

}  // namespace fulgur
