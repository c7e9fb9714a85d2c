#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

namespace fulgur {

// Brings a manifest of an older format up to date: the function under version v makes version v + 1 of it.
using Migrations = std::map<int64_t, std::function<void(nlohmann::json& manifest)>>;

const Migrations& manifest_migrations();  // of this program; none yet, as there is no version before the first

// Applies those from `version` on, one after the other, up to `target`. Throws BadJson if one is missing.
void migrate(nlohmann::json& manifest, int64_t version, int64_t target, const Migrations& migrations);

}  // namespace fulgur
