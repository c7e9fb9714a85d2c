#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/loops/hooks.h"
#include "fulgur/loops/optimizer_steps.h"
#include "fulgur/strategies/presets.h"
#include "fulgur/trainer/check_inputs.h"
#include "fulgur/trainer/fit_state.h"
#include "fulgur/trainer/run.h"

// What callbacks and the Module can ask of a run, or have it do.
namespace fulgur {

std::string Run::device_summary() const {
  const std::vector<c10::Device>& devices = resources_.devices;
  const int64_t num_nodes = resources_.options.num_nodes;
  std::vector<std::string> names;
  for (const c10::Device& device : devices) names.push_back(device.str());
  if (devices.front().is_cpu() && devices.size() > 1) names = {fmt::format("{} x cpu", devices.size())};
  std::string summary = fmt::format("{} on {}", resources_.strategy->name(), fmt::join(names, ", "));
  if (devices.front().is_cpu()) {
    summary += fmt::format(" with {} thread{}{}", at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s",
                           world_.world_size() > 1 ? " each" : "");
  }
  if (num_nodes > 1) summary += fmt::format(", on each of {} machines", num_nodes);
  return summary + fmt::format(", precision {}", resources_.precision.name());
}

// The memory of the model under this strategy and, if different, on a single device.
std::string Run::memory_summary() const {
  const Strategy& own = *resources_.strategy;
  const MemoryRequest request{
      .precision = resources_.precision,
      .num_devices = static_cast<int64_t>(resources_.devices.size()) * resources_.options.num_nodes,
      .num_nodes = resources_.options.num_nodes,
      .device_type = resources_.devices.front().type(),
      .accumulates = context_.accumulate_grad_batches > 1,
      .averages_weights = averages_weights()};
  const auto memory_of = [&](const Strategy& strategy) {
    return strategy.model_memory(*request_.module, own.optimizers(), request);
  };
  const auto memory = memory_of(own);
  if (!memory) return "";
  std::vector<std::pair<std::string, ModelMemory>> rows{{own.name(), *memory}};
  const auto alone = memory_of(*strategy_registry().create("single_device"));
  if (alone->total() != memory->total()) rows.emplace_back("single_device", *alone);
  return format_memory(rows);
}

const Optimizers& Run::optimizers() {
  static const Optimizers kNone;
  return checkpoints_.fit() != nullptr ? resources_.strategy->optimizers() : kNone;
}

void Run::scale_lr(size_t optimizer, size_t group, double factor) {
  const FitState* fit = checkpoints_.fit();
  require(fit != nullptr, "scale_lr: there are optimizers only from on_fit_start to on_fit_end");
  fit->steps.scale_lr(optimizer, group, factor);
}

bool Run::roll_back() {
  require(checkpoints_.fit() != nullptr, "roll_back: only fit can go back to a checkpoint");
  return checkpoints_.roll_back();
}

// A CPU device has no index here, as in tensors.
c10::Device Run::device() const {
  const c10::Device own = world_.devices().front();
  return own.is_cpu() ? c10::Device(c10::kCPU) : own;
}

at::Tensor Run::all_gather(const at::Tensor& tensor) { return all_gather_tensors(context_.world.control(), tensor); }

double Run::from_rank_zero(double value) {
  const at::Tensor shared = at::tensor({value}, at::kDouble);
  context_.world.control().broadcast(shared, /*root=*/0).wait();
  return shared.item<double>();
}

bool Run::in_training_batch() const {
  return results_.state.stage == Stage::train && results_.metrics.batch() != nullptr;
}

bool Run::takes_records() const {
  const RunState& state = results_.state;
  if (global_rank() > 0 || resources_.options.barebones || request_.is_trial || state.sanity_checking) return false;
  return !in_training_batch() || context_.is_logged(state.batches_that_stepped);
}

void Run::send(const Record& record) {
  const RunState& state = results_.state;
  if (in_training_batch()) return context_.hooks.keep(record, state.batches_that_stepped);
  context_.hooks.callbacks_only(hooks::on_record, &Callback::on_record, record, state.last_step());
}

void Run::set_accumulation(int64_t accumulate_grad_batches) {
  if (accumulate_grad_batches < 1) {
    throw UsageError(fmt::format("accumulate_grad_batches must be at least 1; got {}", accumulate_grad_batches));
  }
  context_.accumulate_grad_batches = accumulate_grad_batches;
}

void Run::save_checkpoint(const std::filesystem::path& folder, const SaveOptions& options) {
  if (request_.is_trial) return log_warning("a trial leaves no checkpoint: '{}' is not saved", folder.string());
  checkpoints_.save(folder, options);
}

std::filesystem::path Run::free_checkpoint_path(const std::filesystem::path& wanted) {
  return checkpoints_.free_path(wanted);
}

void Run::remove_checkpoint(const std::filesystem::path& folder) { checkpoints_.remove(folder); }

}  // namespace fulgur
