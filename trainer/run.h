#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/core/callback.h"
#include "fulgur/core/make_module.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/run_state.h"
#include "fulgur/data/data_module.h"
#include "fulgur/loops/evaluation_loop.h"
#include "fulgur/loops/loop_context.h"
#include "fulgur/loops/loop_plan.h"
#include "fulgur/loops/stop_request.h"
#include "fulgur/strategies/precision.h"
#include "fulgur/strategies/strategy.h"
#include "fulgur/trainer/run_checkpoints.h"
#include "fulgur/trainer/run_world.h"
#include "fulgur/trainer/scoped_module_state.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// What lasts as long as a Trainer and serves each of its runs.
struct RunResources {
  explicit RunResources(TrainerOptions given);  // throws UsageError, as Trainer's constructor

  const LoopPlan::Bounds bounds;           // what bounds a whole training, also in fast_dev_run
  const TrainerOptions options;            // resolved
  const std::vector<c10::Device> devices;  // used on each machine
  const Precision precision;
  const std::unique_ptr<Strategy> strategy;
  bool has_warned_slow = false;  // the warning of a precision that is slow on the device was logged
  WarnOnce warn_no_shard{};      // warns of a loader that cannot be sharded
};

// What a run leaves behind.
struct RunResults {
  RunState state{};
  MetricLog metrics{};
  std::optional<ModuleHandle> module{};  // null before the first run
  int64_t rank = 0, world_size = 1;
  std::filesystem::path run_dir{};  // empty: not made yet
};

// The folder for the files of runs, which is made when it is first needed.
const std::filesystem::path& run_dir_of(RunResults& results, const TrainerOptions& options);

struct RunRequest {
  EntryPoint entry_point;
  ModuleHandle module;
  DataModule& data;
  StopRequest& stop;
  LoopPlan plan;
  std::vector<std::shared_ptr<Callback>> callbacks{};
  std::string ckpt_path{};
  bool is_trial = false;  // a fit that leaves no trace: no checkpoint, no callbacks of the module, no
                          // signals; the module's tensors are restored
};

// One call of an entry point of a Trainer, from joining the ranks to leaving them, with all that lives that long.
class Run final : public TrainerControl {
 public:
  // Joins the other ranks. `resources` and `results` are borrowed.
  Run(RunResources& resources, RunResults& results, RunRequest request);

  // Exactly one of these is called, once. Each sets up, runs the loops, tears down, even after an exception, and leaves
  // the ranks.
  void fit();
  Metrics evaluate(Stage stage);
  std::vector<Batch> predict();

  const RunState& state() const override { return results_.state; }
  MetricLog& metrics() override { return results_.metrics; }
  Module& module() override { return *request_.module; }
  const Optimizers& optimizers() override;
  void scale_lr(size_t optimizer, size_t group, double factor) override;
  bool roll_back() override;
  c10::Device device() const override;
  void average_weights(double share) override { resources_.strategy->average_weights(share); }
  bool show_evaluated(bool shown) override { return resources_.strategy->show_evaluated(shown); }
  int64_t global_rank() const override { return world_.rank(); }
  int64_t world_size() const override { return world_.world_size(); }
  at::Tensor all_gather(const at::Tensor& tensor) override;
  double from_rank_zero(double value) override;
  std::string device_summary() const override;
  std::string memory_summary() const override;
  const std::filesystem::path& run_dir() override { return run_dir_of(results_, resources_.options); }
  void request_stop(std::string_view reason) override { request_.stop.request(reason); }
  int64_t accumulation() const override { return context_.accumulate_grad_batches; }
  void set_accumulation(int64_t accumulate_grad_batches) override;
  void save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options) override;
  std::filesystem::path free_checkpoint_path(const std::filesystem::path& wanted) override;
  void remove_checkpoint(const std::filesystem::path& folder) override;

 private:
  bool takes_records() const override;
  void send(const Record& record) override;
  bool in_training_batch() const;
  LoopContext make_context();
  RunAccess make_link();
  void execute(const std::function<void()>& body);
  void report_profile(const trace::Profile& profile);
  void setup();
  void choose_callbacks();
  bool averages_weights() const;
  void setup_strategy();
  void prepare_data();
  void broadcast_run_dir();
  void handle_failure(const std::exception_ptr& failure);
  void give_memory_advice(const std::exception_ptr& failure);
  bool deserves_post_mortem(const std::exception_ptr& failure) const;
  void leave_post_mortem(const std::exception_ptr& failure);
  void call_on_exception(const std::exception_ptr& failure);
  void teardown();
  void remove_unused_run_dir();
  int64_t local_world_size() const;
  std::shared_ptr<Loader> shard(std::shared_ptr<Loader> loader, std::string_view name, bool even);
  LoaderList shard(LoaderList loaders, std::string_view name);

  RunResources& resources_;
  RunResults& results_;
  const RunRequest request_;
  RunWorld world_;
  std::vector<std::shared_ptr<Callback>>
      callbacks_;  // the callbacks of the request, and after setup those of the Module too
  RunCheckpoints checkpoints_;
  LoopContext context_;
  const RunAccess link_;            // what the module can access of the run
  std::string post_mortem_name_{};  // a folder in the run's folder, the same on every rank; empty: not chosen yet
  std::optional<ScopedModuleState> restored_;  // restores the module after a trial
};

}  // namespace fulgur
