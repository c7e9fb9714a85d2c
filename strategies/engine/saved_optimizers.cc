#include "fulgur/strategies/engine/saved_optimizers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <unordered_map>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

std::string updates_key(const std::string& parameter) { return "num_updates/" + parameter; }
std::string strides_key(const std::string& parameter) { return "strides/" + parameter; }
std::string optimizer_key(size_t index) { return fmt::format("optimizers/{}", index); }

// The strides of a parameter as text; empty for row-major order.
std::string memory_order(const at::Tensor& param) {
  return param.is_contiguous() ? "" : fmt::format("{}", fmt::join(param.strides(), ","));
}

void check_memory_order(const State& shared, const Trained& trained) {
  const auto* saved = shared.find<std::string>(strides_key(trained.name));
  if (memory_order(trained.param) == (saved == nullptr ? "" : *saved)) return;
  throw CheckpointError(fmt::format(
      "parameter '{}' lies in memory in another order (strides) than when the checkpoint was written, and so would its "
      "optimizer state; give it the same memory format, or load the weights only",
      trained.name));
}

State settings_of(const Optimizer& optimizer) {
  State state;
  state.set("name", std::string(optimizer.name()));
  state.set("num_groups", static_cast<int64_t>(optimizer.groups().size()));
  for (size_t g = 0; g < optimizer.groups().size(); ++g) {
    state.set(fmt::format("groups/{}/lr", g), optimizer.groups()[g].lr);
    state.set(fmt::format("groups/{}/weight_decay", g), optimizer.groups()[g].weight_decay);
  }
  state.set_child("own", optimizer.state());
  return state;
}

void load_settings(Optimizer& optimizer, const State& state) {
  const auto& name = state.get<std::string>("name");
  const bool is_old = name == "TorchOptimizer";  // which says itself why that cannot be read
  if (name != optimizer.name() && !(is_old && optimizer.name().starts_with("TorchOptimizer"))) {
    throw CheckpointError(
        fmt::format("the checkpoint has the state of {}, but configure_optimizers returns {} now; "
                    "return the same, or load the weights only",
                    name, optimizer.name()));
  }
  const int64_t num_groups = state.get<int64_t>("num_groups");
  if (num_groups != static_cast<int64_t>(optimizer.groups().size())) {
    throw CheckpointError(
        fmt::format("the checkpoint has {} parameter groups of {}, but configure_optimizers returns {} now; return as "
                    "many, those that were added later too, or load the weights only",
                    num_groups, name, optimizer.groups().size()));
  }
  for (size_t g = 0; g < optimizer.groups().size(); ++g) {
    optimizer.groups()[g].lr = state.get<double>(fmt::format("groups/{}/lr", g));
    optimizer.groups()[g].weight_decay = state.get<double>(fmt::format("groups/{}/weight_decay", g));
  }
  optimizer.load_state(state.child("own"));
}

}  // namespace

std::vector<Trained> trained_params(const torch::nn::Module& module, const Optimizers& optimizers) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  std::vector<Trained> trained;
  for (const auto& optimizer : optimizers) {
    for (size_t g = 0; g < optimizer->groups().size(); ++g) {
      const auto& params = optimizer->groups()[g].params;
      for (size_t i = 0; i < params.size(); ++i) {
        const auto name = names.find(params[i].unsafeGetTensorImpl());
        if (name != names.end()) trained.push_back({name->second, params[i], optimizer.get(), g, i});
      }
    }
  }
  return trained;
}

void save_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, State& shared) {
  for (size_t i = 0; i < optimizers.size(); ++i) shared.set_child(optimizer_key(i), settings_of(optimizers[i]));
  for (const Trained& trained : trained_params(module, optimizers)) {
    if (const std::string order = memory_order(trained.param); !order.empty()) {
      shared.set(strides_key(trained.name), order);
    }
  }
}

void load_optimizers(const torch::nn::Module& module, const Optimizers& optimizers, const State& shared) {
  if (!shared.child(optimizer_key(optimizers.size())).empty()) {
    throw CheckpointError(
        fmt::format("the checkpoint has the state of more optimizers than the {} that configure_optimizers returns "
                    "now; return as many, or load the weights only",
                    optimizers.size()));
  }
  for (size_t i = 0; i < optimizers.size(); ++i) load_settings(optimizers[i], shared.child(optimizer_key(i)));
  for (const Trained& trained : trained_params(module, optimizers)) check_memory_order(shared, trained);
}

// A parameter without elements has no ranges to read, so its count is not saved.
void save_num_updates(State& shared, const Trained& trained, int64_t num_updates) {
  if (num_updates > 0 && trained.param.numel() > 0) shared.set(updates_key(trained.name), num_updates);
}

int64_t saved_num_updates(const State& shared, const std::string& parameter) {
  const auto* saved = shared.find<int64_t>(updates_key(parameter));
  return saved == nullptr ? 0 : *saved;
}

StateTensors part_of(const ParameterState& whole, int64_t begin, int64_t num_elements) {
  StateTensors part;
  for (const auto& [name, tensor] : whole.tensors) {
    part.emplace(name, tensor.as_strided({tensor.numel()}, {1}).narrow(0, begin, num_elements));
  }
  return part;
}

ParameterState read_whole(const Trained& trained, const State& shared, const ReadRange& read) {
  ParameterState state{.num_updates = saved_num_updates(shared, trained.name)};
  if (state.num_updates == 0) return state;
  for (const auto& [name, tensor] : read(trained.name, 0, trained.param.numel())) {
    state.tensors.emplace(name, tensor.as_strided(trained.param.sizes(), trained.param.strides()));
  }
  return state;
}

}  // namespace fulgur
