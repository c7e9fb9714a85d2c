#include "fulgur/distributed/group.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>

namespace fulgur {

GroupConfig GroupConfig::part(const std::string& name_of_part, const std::vector<int64_t>& places) const {
  GroupConfig part = *this;
  part.name = fmt::format("{}.{}", name, name_of_part);
  part.rank = std::ranges::find(places, rank) - places.begin();
  part.ranks.clear();
  for (const int64_t place : places) part.ranks.push_back(ranks[static_cast<size_t>(place)]);
  return part;
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
