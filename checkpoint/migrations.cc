#include "fulgur/checkpoint/migrations.h"

#include <fmt/format.h>

#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur {

const Migrations& manifest_migrations() {
  static const Migrations migrations;
  return migrations;
}

void migrate(nlohmann::json& manifest, int64_t version, int64_t target, const Migrations& migrations) {
  for (; version < target; ++version) {
    const auto migration = migrations.find(version);
    if (migration == migrations.end()) throw BadJson(fmt::format("there is no format version {}", version));
    migration->second(manifest);
  }
}

}  // namespace fulgur
