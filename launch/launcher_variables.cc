#include "fulgur/launch/launcher_variables.h"

#include <algorithm>
#include <array>

namespace fulgur {
namespace {

constexpr std::array<std::string_view, 13> kNames{
    "RANK",      "WORLD_SIZE",      "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",  "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK",  "MASTER_ADDR",      "MASTER_PORT", "FULGUR_PARENT_PID"};

constexpr std::array<std::string_view, 7> kPrefixes{"TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_",
                                                    "PMI_",          "PRTE_",  "ORTE_"};

}  // namespace

bool is_launcher_variable(std::string_view name) {
  return std::ranges::find(kNames, name) != kNames.end() ||
         std::ranges::any_of(kPrefixes, [name](std::string_view prefix) { return name.starts_with(prefix); });
}

}  // namespace fulgur
