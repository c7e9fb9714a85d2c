#include "fulgur/strategies/engine/rank_agreement.h"

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/rank_messages.h"

namespace fulgur {
namespace {

// Whether all ranks have the same text, by its hash: the names of a large model's parameters take 100 KB on each rank.
bool is_same_on_all(const std::string& text, Collective& control) {
  const std::vector<std::string> hashes = all_gather_bytes(control, std::to_string(std::hash<std::string>()(text)));
  return std::ranges::count(hashes, hashes.front()) == control.world_size();
}

// Throws on every rank, with the first line that differs from rank 0's. `what` names the lines, in the plural.
void check_same_lines(const std::vector<std::string>& lines, Collective& control, std::string_view what) {
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  if (is_same_on_all(text, control)) return;
  const std::vector<std::string> by_rank = all_gather_bytes(control, text);
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    std::istringstream ours(by_rank[0]), theirs(by_rank[rank]);
    std::string our_line, their_line;
    while (our_line == their_line) {
      if (!std::getline(ours, our_line)) our_line = "nothing further";
      if (!std::getline(theirs, their_line)) their_line = "nothing further";
    }
    throw SetupError(
        fmt::format("the {} differ between ranks: rank 0 has {}, rank {} has {}; build the same on every "
                    "rank, whatever its number",
                    what, our_line, rank, their_line));
  }
}

std::string describe(const std::string& name, const at::Tensor& tensor) {
  return c10::str("'", name, "' of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type());
}

}  // namespace

void make_equal(const torch::nn::Module& module, World& world) {
  std::vector<std::string> lines;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_state(module)) {
    lines.push_back(describe(name, tensor));
    tensors.push_back(tensor);
  }
  check_same_lines(lines, world.control(), "parameters and buffers");
  broadcast_tensors(world.data(), tensors, /*root=*/0);
}

void check_same_buckets(const FlatParameters& parameters, const NamedTensors& added, Collective& control) {
  std::vector<std::string> lines;
  for (const auto& bucket : parameters.buckets()) {
    for (const auto& slot : bucket.slots) {
      lines.push_back(fmt::format("{} in group {} of optimizer {}", describe(slot.name, slot.param), bucket.group,
                                  bucket.optimizer));
    }
  }
  for (const auto& [name, tensor] : added) lines.push_back(describe(name, tensor) + ", new");
  check_same_lines(lines, control, "trainable parameters");
}

}  // namespace fulgur
