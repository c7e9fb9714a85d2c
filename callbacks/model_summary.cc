#include "fulgur/callbacks/model_summary.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <unordered_set>
#include <vector>

#include "fulgur/core/module.h"

namespace fulgur {
namespace {

struct Row {
  std::string name, type, num_params;
};

struct Totals {
  int64_t trainable = 0, frozen = 0;
};

std::string short_count(int64_t count) {
  if (count >= 1'000'000'000) return fmt::format("{:.1f} B", static_cast<double>(count) / 1e9);
  if (count >= 1'000'000) return fmt::format("{:.1f} M", static_cast<double>(count) / 1e6);
  if (count >= 1'000) return fmt::format("{:.1f} K", static_cast<double>(count) / 1e3);
  return fmt::format("{}", count);
}

Totals count_parameters(const torch::nn::Module& module) {
  Totals totals;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const at::Tensor& param : module.parameters()) {
    if (!seen.insert(param.unsafeGetTensorImpl()).second) continue;
    (param.requires_grad() ? totals.trainable : totals.frozen) += param.numel();
  }
  return totals;
}

std::vector<Row> child_rows(const Module& module) {
  std::vector<Row> rows;
  for (const auto& child : module.named_children()) {
    const Totals totals = count_parameters(*child.value());
    std::string type = child.value()->name();
    type.erase(0, type.starts_with("torch::nn::") ? std::string_view("torch::nn::").size() : 0);
    if (type.ends_with("Impl")) type.resize(type.size() - 4);
    rows.push_back({child.key(), type, short_count(totals.trainable + totals.frozen)});
  }
  return rows;
}

std::string format_table(const std::vector<Row>& rows) {
  Row width{"name", "type", "params"};
  size_t name = 4, type = 4, params = 6;
  for (const Row& row : rows) {
    name = std::max(name, row.name.size());
    type = std::max(type, row.type.size());
    params = std::max(params, row.num_params.size());
  }
  const auto line = [&](const Row& row) {
    return fmt::format("{:<{}}  {:<{}}  {:>{}}\n", row.name, name, row.type, type, row.num_params, params);
  };
  const std::string rule = fmt::format("{:-<{}}\n", "", name + type + params + 4);
  std::string table = line(width) + rule;
  for (const Row& row : rows) table += line(row);
  return table + rule;
}

// "39 steps in an epoch, 585 in all, each of 2 x 32 = 64 samples": ranks, and batches of accumulation, are factors.
// What is not known is left out.
std::string steps_line(TrainerControl& trainer) {
  const RunState& state = trainer.state();
  std::vector<std::string> parts;
  if (state.num_batches) {
    const int64_t steps = (*state.num_batches + trainer.accumulation() - 1) / trainer.accumulation();
    parts.push_back(fmt::format("{} step{} in an epoch", steps, steps == 1 ? "" : "s"));
  }
  if (state.estimated_stepping_batches && !state.is_dry_run) {
    parts.push_back(fmt::format("{} in all", *state.estimated_stepping_batches));
  }
  if (state.batch_size) {
    std::string factors;
    int64_t samples = *state.batch_size;
    for (const int64_t factor : {trainer.accumulation(), trainer.world_size()}) {
      if (factor > 1) factors += fmt::format("{} x ", factor);
      samples *= factor;
    }
    if (!factors.empty()) factors += fmt::format("{} = ", *state.batch_size);
    parts.push_back(fmt::format("each of {}{} sample{}", factors, samples, samples == 1 ? "" : "s"));
  }
  return parts.empty() ? "" : fmt::format("{}\n\n", fmt::join(parts, ", "));
}

}  // namespace

ModelSummary::ModelSummary(Options options) : options_(options) {
  if (options_.out == nullptr) options_.out = &std::cout;
}

std::shared_ptr<ModelSummary> ModelSummary::make(Options options) { return std::make_shared<ModelSummary>(options); }

void ModelSummary::on_fit_start(TrainerControl& trainer) {
  const Totals totals = count_parameters(trainer.module());
  const std::string memory = trainer.memory_summary();
  *options_.out << fmt::format("{}\n\n{}{} trainable, {} frozen\n\n{}{}{}", trainer.device_summary(),
                               format_table(child_rows(trainer.module())), short_count(totals.trainable),
                               short_count(totals.frozen), memory, memory.empty() ? "" : "\n", steps_line(trainer))
                << std::flush;
}

}  // namespace fulgur
