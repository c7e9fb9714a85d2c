#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

// The names of a checkpoint's files and of the entries in them, shared by the writer and the reader.
namespace fulgur::layout {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kRunState = "state.json";
constexpr const char* kRunTensors = "state.safetensors";
constexpr const char* kRankState = "state";   // metadata key in a rank's file
constexpr const char* kRankPrefix = "rank/";  // name prefix of the rank's own tensors in its file

std::string rank_file(int64_t rank, int64_t world_size);

// "net.0.weight:exp_avg[0:128]"
struct RangeName {
  std::string parameter, tensor;
  int64_t begin = 0, end = 0;
};
std::string to_string(const RangeName& name);
std::optional<RangeName> parse_range_name(std::string_view text);  // nullopt if the text is no such name

}  // namespace fulgur::layout
