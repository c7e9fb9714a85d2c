#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

namespace fulgur {

// Migrates manifests of older formats: the function at key v converts version v to version v + 1.
using Migrations = std::map<int64_t, std::function<void(nlohmann::json& manifest)>>;

const Migrations& manifest_migrations();  // for this program's format; empty, as version 1 is the first

// Applies the migrations from `version` up to `target` in order. Throws BadJson if one is missing.
void migrate(nlohmann::json& manifest, int64_t version, int64_t target, const Migrations& migrations);

}  // namespace fulgur
