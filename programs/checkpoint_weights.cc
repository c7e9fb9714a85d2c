#include "fulgur/programs/checkpoint_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "fulgur/base/error.h"

namespace fulgur {

NamedTensors weights_by_every_name(const CheckpointReader& checkpoint) {
  NamedTensors weights = checkpoint.finished_weights();
  const std::map<std::string, at::Tensor> by_name(weights.begin(), weights.end());
  for (const auto& parameter : checkpoint.manifest().parameters) {
    if (!parameter.alias_of.empty()) weights.emplace_back(parameter.name, by_name.at(parameter.alias_of));
  }
  return weights;
}

std::map<std::string, at::Tensor> weights_of_program(const CheckpointReader& checkpoint,
                                                     const std::map<std::string, std::vector<int64_t>>& sizes,
                                                     std::string_view program) {
  if (sizes.empty()) return {};
  const NamedTensors tensors = weights_by_every_name(checkpoint);
  const std::map<std::string, at::Tensor> all(tensors.begin(), tensors.end());
  const std::string& first = sizes.begin()->first;
  std::vector<std::string> prefixes;
  for (const auto& [name, tensor] : all) {
    if (!name.ends_with(first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (!prefix.empty() && !prefix.ends_with('.')) continue;
    const auto is_there = [&](const auto& weight) {
      const auto found = all.find(prefix + weight.first);
      return found != all.end() && found->second.sizes() == at::IntArrayRef(weight.second);
    };
    if (std::ranges::all_of(sizes, is_there)) prefixes.push_back(prefix);
  }
  if (prefixes.empty()) {
    throw UsageError(
        fmt::format("{} does not have the weights of {} ({}, ...)", checkpoint.folder().string(), program, first));
  }
  if (prefixes.size() > 1) {
    throw UsageError(
        fmt::format("{} has the weights of {} several times, below '{}': write one of them in C++, by "
                    "export_program()",
                    checkpoint.folder().string(), program, fmt::join(prefixes, "', '")));
  }
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, shape] : sizes) weights.emplace(name, all.at(prefixes.front() + name));
  return weights;
}

}  // namespace fulgur
