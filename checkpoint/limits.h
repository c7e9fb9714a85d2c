#pragma once

#include <cstdint>

// How large the parts of a checkpoint may be. A reader refuses anything larger, so that a hostile file cannot exhaust
// memory; a writer refuses to write it, so that every checkpoint written can be read.
namespace fulgur::limits {

constexpr int64_t kManifestBytes = int64_t{256} << 20;
constexpr int64_t kRunStateBytes = int64_t{256} << 20;    // state.json
constexpr int64_t kSafetensorsHeaderBytes = 100'000'000;  // upstream's limit
constexpr int64_t kJsonValues = int64_t{1} << 22;         // numbers, texts, objects and arrays in a JSON text

}  // namespace fulgur::limits
