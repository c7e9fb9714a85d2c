#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/scaling/scenario.h"

namespace fulgur::scaling {

// The steps of all compared strategies on a number of ranks.
struct TableRow {
  int64_t ranks = 0;
  std::array<std::optional<Outcome>, std::size(kCompared)> outcomes{};  // by Compared; nullopt: does not fit
};

// Rows for scenario.ranks().
std::vector<TableRow> weak_scaling(Scenario& scenario);
std::vector<TableRow> strong_scaling(Scenario& scenario);

// Texts for people, as the tool prints them.
std::string assumptions(const Scenario& scenario);
std::string closely(Scenario& scenario);  // on options().hosts: times, bytes by link, memory
std::string to_text(std::string_view title, const Scenario& scenario, const std::vector<TableRow>& rows);

// On how many ranks zero_offload is ahead of ddp_sharded, or behind, and shards within a host are ahead of shards over
// all ranks, or behind.
std::string crossings(const std::vector<TableRow>& rows);

// TFLOPS of a rank over the number of ranks, as an SVG file.
std::string picture(const Scenario& scenario, const std::vector<TableRow>& rows);

}  // namespace fulgur::scaling
