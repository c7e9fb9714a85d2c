#include "fulgur/programs/checkpoint_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ranges>

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
  const auto fail = [&](std::string_view reason) {
    throw UsageError(fmt::format("{} {}", checkpoint.folder().string(), reason));
  };
  std::vector<std::string> prefixes;
  std::string stranger;  // a weight that the program does not have, beside all that it has
  for (const auto& [name, tensor] : all) {
    if (!name.ends_with(first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (!prefix.empty() && !prefix.ends_with('.')) continue;
    const auto is_there = [&](const auto& weight) {
      const auto found = all.find(prefix + weight.first);
      return found != all.end() && found->second.sizes() == at::IntArrayRef(weight.second);
    };
    if (!std::ranges::all_of(sizes, is_there)) continue;
    const auto is_strange = [&](const std::string& other) {
      return other.starts_with(prefix) && !sizes.contains(other.substr(prefix.size()));
    };
    const auto names = std::views::keys(all);
    const auto strange = std::ranges::find_if(names, is_strange);
    if (strange == names.end()) {
      prefixes.push_back(prefix);
    } else {
      stranger = *strange;
    }
  }
  if (prefixes.empty() && !stranger.empty()) {
    fail(fmt::format("is of a larger model than {}: it has '{}', too", program, stranger));
  }
  if (prefixes.empty()) fail(fmt::format("does not have the weights of {} ({}, ...)", program, first));
  if (prefixes.size() > 1) {
    fail(fmt::format("has the weights of {} several times, below '{}': write one of them in C++, by export_program()",
                     program, fmt::join(prefixes, "', '")));
  }
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, shape] : sizes) weights.emplace(name, all.at(prefixes.front() + name));
  return weights;
}

}  // namespace fulgur
