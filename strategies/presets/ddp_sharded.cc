#include "fulgur/strategies/presets/ddp_sharded.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>
#include <system_error>

#include "fulgur/base/error.h"
#include "fulgur/base/names.h"
#include "fulgur/strategies/engine/engine_options.h"

namespace fulgur {
namespace {

int64_t shard_group_of(std::string_view text) {
  const std::string name = canonical_name(text);
  if (name == "all") return kAllRanks;
  if (name == "host") return kRanksOfHost;
  int64_t size = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (!is_number || size < 1) {
    throw UsageError(fmt::format(
        "strategy.shard_group = '{}' is no group of ranks; write all, host, or a number of ranks such as 8", text));
  }
  if (size == 1) {
    throw UsageError(
        "strategy.shard_group = 1 shards nothing, as every rank would keep all; write host, a larger number, or "
        "strategy = 'ddp'");
  }
  return size;
}

}  // namespace

void describe_reduce(std::string& reduce, FieldVisitor& visit) {
  visit({.name = "reduce",
         .help = "when gradients are reduced over ranks, at each micro-batch or once per optimizer step",
         .choices = {"each_micro_batch", "at_boundary"}},
        &reduce);
}

void describe_shard_group(std::string& shard_group, FieldVisitor& visit) {
  visit({.name = "shard_group",
         .help = "ranks over which gradients and optimizer state are sharded; every such group has all of them: all, "
                 "host (the ranks of a host), or a number of ranks"},
        &shard_group);
}

void DdpSharded::describe(FieldVisitor& visit) {
  visit({.name = "stage",
         .help = "what is sharded; 2: gradients and optimizer state, 1: state alone",
         .min = 1,
         .max = 2},
        &stage);
  describe_reduce(reduce, visit);
  describe_shard_group(shard_group, visit);
  ranks.describe(visit);
}

EngineOptions DdpSharded::engine_options() const {
  EngineOptions engine = ranks.engine_options();
  engine.shard = true;
  engine.shard_group = shard_group_of(shard_group);
  engine.each_micro_batch = stage == 2 && canonical_name(reduce) == "each_micro_batch";
  return engine;
}

}  // namespace fulgur
