#include "fulgur/distributed/group.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <map>

#include "fulgur/base/error.h"

namespace fulgur {

GroupConfig GroupConfig::part(const std::string& name_of_part, const std::vector<int64_t>& places) const {
  GroupConfig part = *this;
  part.name = fmt::format("{}.{}", name, name_of_part);
  part.rank = std::ranges::find(places, rank) - places.begin();
  part.ranks.clear();
  for (const int64_t place : places) part.ranks.push_back(ranks[static_cast<size_t>(place)]);
  return part;
}

void check_every_rank_can(const GroupConfig& group, std::string_view transport, const std::string& why_not) {
  std::map<std::string, std::vector<int64_t>> ranks;  // by reason
  const std::vector<std::string> reasons = exchange_texts(group, fmt::format("why not {}", transport), why_not);
  for (size_t i = 0; i < reasons.size(); ++i) {
    if (!reasons[i].empty()) ranks[reasons[i]].push_back(group.ranks[i]);
  }
  if (ranks.empty()) return;
  wait_until_all_know(group, transport);
  std::vector<std::string> sentences;
  for (const auto& [reason, which] : ranks) {
    sentences.push_back(
        fmt::format("rank{} {} cannot: {}", which.size() == 1 ? "" : "s", fmt::join(which, ", "), reason));
  }
  throw UsageError(fmt::format("strategy.transport = '{}', but {}", transport, fmt::join(sentences, "; ")));
}

void wait_until_all_know(const GroupConfig& group, std::string_view what) {
  try {
    exchange_texts(group, fmt::format("told {}", what), "");
  } catch (const std::exception&) {  // a rank, or the store, has ended: this one knows all the same
  }
}

std::vector<std::string> exchange_texts(const GroupConfig& group, std::string_view what, const std::string& mine) {
  c10d::PrefixStore store(fmt::format("{}/{}", group.name, what), group.store);
  const auto key = [](int64_t rank) { return std::to_string(rank); };
  store.set(key(group.rank), mine);
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < group.world_size(); ++rank) keys.push_back(key(rank));
  store.wait(keys, group.connect_timeout);
  std::vector<std::string> all;
  for (const std::vector<uint8_t>& value : store.multiGet(keys)) all.emplace_back(value.begin(), value.end());
  return all;
}

}  // namespace fulgur
