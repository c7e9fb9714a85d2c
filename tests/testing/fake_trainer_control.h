#pragma once

#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fulgur/core/callback.h"
#include "tests/testing/tiny.h"

namespace fulgur::testing {

// A TrainerControl whose state and metrics a test sets by hand.
class FakeTrainerControl final : public TrainerControl {
 public:
  explicit FakeTrainerControl(std::filesystem::path run_dir) : run_dir_(std::move(run_dir)) {}

  RunState run_state{};
  MetricLog metric_log;
  TinyModule tiny;
  Optimizers optimizer_list;
  std::vector<std::filesystem::path> saved;
  std::vector<std::string> stop_reasons;
  std::vector<Record> records;
  std::vector<std::tuple<size_t, size_t, double>> scaled;  // the arguments of scale_lr()
  bool has_checkpoint = false;                             // to roll back to
  int64_t num_roll_backs = 0;
  std::vector<double> shares;  // the arguments of average_weights()
  bool evaluated_are_shown = false;
  int64_t accumulate = 1, ranks = 1;

  // Logs `metrics` as one epoch of the stage does.
  void log_epoch(Stage stage, const Metrics& metrics, const LogOptions& options = {}) {
    metric_log.begin_epoch(stage);
    static constexpr Hook kEpochEnd{"on_epoch_end", LogScope::epoch};
    metric_log.enter(stage, kEpochEnd);
    for (const auto& [name, value] : metrics) metric_log.log(name, value, options);
    metric_log.end_epoch(stage);
  }

  const RunState& state() const override { return run_state; }
  MetricLog& metrics() override { return metric_log; }
  Module& module() override { return tiny; }
  const Optimizers& optimizers() override { return optimizer_list; }
  void scale_lr(size_t optimizer, size_t group, double factor) override {
    scaled.emplace_back(optimizer, group, factor);
  }
  bool roll_back() override {
    num_roll_backs += has_checkpoint;
    return has_checkpoint;
  }
  void average_weights(double share) override { shares.push_back(share); }
  bool show_evaluated(bool shown) override { return std::exchange(evaluated_are_shown, shown); }
  int64_t global_rank() const override { return 0; }
  int64_t world_size() const override { return ranks; }
  c10::Device device() const override { return c10::kCPU; }
  at::Tensor all_gather(const at::Tensor& tensor) override { return tensor.unsqueeze(0); }
  std::string device_summary() const override { return "single_device on cpu"; }
  std::string memory_summary() const override { return "MB on each rank\n"; }
  const std::filesystem::path& run_dir() override { return run_dir_; }
  void request_stop(std::string_view reason) override { stop_reasons.emplace_back(reason); }
  void set_accumulation(int64_t accumulate_grad_batches) override { accumulate = accumulate_grad_batches; }
  int64_t accumulation() const override { return accumulate; }
  void save_checkpoint(const std::filesystem::path& folder, const SaveOptions&) override {
    std::filesystem::create_directories(folder);
    saved.push_back(folder);
  }
  std::filesystem::path free_checkpoint_path(const std::filesystem::path& wanted) override {
    std::filesystem::path path = wanted;
    for (int version = 1; std::filesystem::exists(path); ++version)
      path = wanted.string() + "-v" + std::to_string(version);
    return path;
  }
  double from_rank_zero(double value) override { return value; }
  void remove_checkpoint(const std::filesystem::path& folder) override { std::filesystem::remove_all(folder); }

 private:
  bool takes_records() const override { return true; }
  void send(const Record& record) override { records.push_back(record); }

  std::filesystem::path run_dir_;
};

}  // namespace fulgur::testing
