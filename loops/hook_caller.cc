#include "fulgur/loops/hook_caller.h"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <optional>

#include "fulgur/base/type_name.h"

namespace fulgur {
namespace {

std::string description_of(const Batch& batch) {
  std::vector<std::string> tensors;
  for (const auto& [name, tensor] : batch) {
    std::string type = c10::toString(tensor.scalar_type());
    std::ranges::transform(type, type.begin(),
                           [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
    // A nested tensor has no sizes, and this runs while an exception travels.
    tensors.push_back(tensor.is_nested() ? c10::str(name, " nested ", type)
                                         : c10::str(name, " ", tensor.sizes(), " ", type));
  }
  return fmt::format("{}", fmt::join(tensors, ", "));
}

}  // namespace

std::string_view HookCaller::name_of_span(const std::type_info& owner, const Hook& hook) {
  std::string& name = span_names_[{&owner, &hook}];
  if (name.empty()) name = fmt::format("{}.{}", short_type_name(owner), hook.name);
  return name;
}

HookCaller::WhatRuns HookCaller::what_runs_in(const Hook& hook) const {
  const bool is_of_batch = hook.scope == LogScope::training_step || hook.scope == LogScope::evaluation_step ||
                           &hook == &hooks::batch_transfer;
  if (is_of_batch || metrics_.batch() != nullptr) return WhatRuns::batch;
  return hook.scope == LogScope::epoch ? WhatRuns::epoch : WhatRuns::run;
}

std::string HookCaller::place(std::string_view what, WhatRuns runs) const {
  std::vector<std::string> details;
  if (runs != WhatRuns::run) {
    details.emplace_back(state_.sanity_checking ? std::string_view("sanity check") : to_string(state_.stage));
    if (state_.entry_point == EntryPoint::fit) details.push_back(fmt::format("epoch {}", state_.epoch));
  }
  if (runs == WhatRuns::batch) {
    std::string batch = fmt::format("batch {}", state_.batch_idx);
    if (const auto loader = metrics_.dataloader()) batch += fmt::format(" of loader {}", *loader);
    if (metrics_.batch() != nullptr) batch += fmt::format(" with {}", description_of(*metrics_.batch()));
    details.push_back(std::move(batch));
  }
  if (control_.world_size() > 1) details.push_back(fmt::format("rank {}", control_.global_rank()));
  return details.empty() ? fmt::format("in {}", what) : fmt::format("in {} ({})", what, fmt::join(details, ", "));
}

}  // namespace fulgur
