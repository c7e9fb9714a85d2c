#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

// The names in a checkpoint's folder and in its files: what the writer and the reader have in common.
namespace fulgur::layout {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kRunState = "state.json";
constexpr const char* kRunTensors = "state.safetensors";
constexpr const char* kRankState = "state";   // in the metadata of a rank's file
constexpr const char* kRankPrefix = "rank/";  // of the rank's own tensors there

std::string rank_file(int64_t rank, int64_t world_size);

// "net.0.weight:exp_avg[0:128]"
struct RangeName {
  std::string parameter, tensor;
  int64_t begin = 0, end = 0;
};
std::string to_string(const RangeName& name);
std::optional<RangeName> parse_range_name(std::string_view text);  // nothing if it is none

}  // namespace fulgur::layout
