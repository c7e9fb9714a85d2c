#include "fulgur/checkpoint/load_weights.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/listed.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/type_name.h"
#include "fulgur/checkpoint/checkpoint_reader.h"
#include "fulgur/core/module_state.h"

namespace fulgur {
namespace {

// Weights are rounded between floating types, as precisions require; no other types are converted.
bool converts(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() || (from.is_floating_point() && to.is_floating_point());
}

// All names of each tensor; tied tensors have several.
std::unordered_map<const c10::TensorImpl*, std::vector<std::string>> names_in(const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, std::vector<std::string>> names;
  const auto add = [&](const auto& items) {
    for (const auto& item : items) names[item.value().unsafeGetTensorImpl()].push_back(item.key());
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return names;
}

}  // namespace

void load_weights(torch::nn::Module& module, const NamedTensors& weights, std::string_view source, bool strict) {
  const c10::NoGradGuard no_grad;
  const std::string type = type_name(typeid(module));
  std::map<std::string, at::Tensor> unused(weights.begin(), weights.end());
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<std::string> missing;
  const auto names = names_in(module);
  for (const auto& [first_name, tensor] : named_state(module)) {
    at::Tensor saved;
    for (const std::string& name : names.at(tensor.unsafeGetTensorImpl())) {
      const auto found = unused.extract(name);
      if (found && !saved.defined()) saved = found.mapped();
    }
    if (!saved.defined()) {
      missing.push_back(first_name);
      continue;
    }
    if (saved.sizes() != tensor.sizes()) {
      throw CheckpointError(fmt::format("{}: '{}' has shape {}, but that of {} has shape {}", source, first_name,
                                        fmt::join(saved.sizes(), "x"), type, fmt::join(tensor.sizes(), "x")));
    }
    if (!converts(saved, tensor)) {
      throw CheckpointError(fmt::format("{}: '{}' has dtype {}, but that of {} has dtype {}", source, first_name,
                                        c10::toString(saved.scalar_type()), type, c10::toString(tensor.scalar_type())));
    }
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      throw CheckpointError(fmt::format(
          "{}: elements of '{}' share memory, as expand() makes them, so that nothing can be loaded into it; register "
          "a contiguous() copy",
          source, first_name));
    }
    copies.emplace_back(tensor, saved);
  }
  std::string what;
  if (!missing.empty()) what += fmt::format("; it lacks {}", listed(missing));
  if (!unused.empty()) {
    std::vector<std::string> unexpected;
    for (const auto& [name, tensor] : unused) unexpected.push_back(name);
    what += fmt::format("; it has {}, which {} lacks", listed(std::move(unexpected)), type);
  }
  const std::string message = fmt::format("{} does not match {}{}", source, type, what);
  if (!what.empty() && strict)
    throw CheckpointError(message + "; to load what there is, set ckpt_strict (of load_weights: strict) to false");
  if (!what.empty()) log_warning("{}", message);
  for (auto& [tensor, saved] : copies) tensor.copy_(saved);
}

State saved_hyper_parameters(const std::filesystem::path& folder) {
  return CheckpointReader(folder).run().child("hyper_parameters");
}

}  // namespace fulgur
