#include "fulgur/checkpoint/checkpoint_reader.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/layout.h"
#include "fulgur/checkpoint/limits.h"
#include "fulgur/checkpoint/state_json.h"

namespace fulgur {
namespace {

std::string range_key(std::string_view parameter, int64_t begin, int64_t end) {
  return fmt::format("{}[{}:{}]", parameter, begin, end);
}

// Parses "3,1"; nullopt if the text is no list of numbers.
std::optional<std::vector<int64_t>> parse_strides(std::string_view text) {
  std::vector<int64_t> strides;
  const char *next = text.data(), *const end = text.data() + text.size();
  while (true) {
    const auto [rest, error] = std::from_chars(next, end, strides.emplace_back());
    if (error != std::errc()) return std::nullopt;
    if (rest == end) return strides;
    if (*rest != ',') return std::nullopt;
    next = rest + 1;
  }
}

// Whether a tensor of these strides lies within as many elements as `sizes` has.
bool fit(c10::IntArrayRef sizes, const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size()) return false;
  int64_t numel = 1, last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t distance = 0;
    numel *= sizes[i];
    if (strides[i] < 0 || __builtin_mul_overflow(std::max<int64_t>(sizes[i] - 1, 0), strides[i], &distance) ||
        __builtin_add_overflow(last, distance, &last)) {
      return false;
    }
  }
  return numel == 0 || last < numel;
}

}  // namespace

CheckpointReader::CheckpointReader(std::filesystem::path folder, VerifyOptions verify)
    : folder_(std::move(folder)), verify_(verify), manifest_(read_manifest(folder_)) {
  fulgur::verify(folder_, manifest_, {.digests = false});
  for (const Manifest::Range& range : manifest_.ranges) {
    parts_[range.parameter].push_back({range.begin, range.end, range.file});
  }
  for (auto& [parameter, parts] : parts_) std::ranges::sort(parts, {}, &Part::begin);
  check(layout::kRunState);
  run_ = state_from_json(read_text_file(folder_ / layout::kRunState, limits::kRunStateBytes), layout::kRunState,
                         [&](const std::string& name) { return file(layout::kRunTensors).tensor(name); });
}

State CheckpointReader::rank(int64_t rank) const {
  const std::string name = layout::rank_file(rank, manifest_.world_size);
  if (manifest_.find_file(name) == nullptr) return {};
  const SafetensorsFile& tensors = file(name);
  const auto state = tensors.metadata().find(layout::kRankState);
  if (state == tensors.metadata().end()) return {};
  return state_from_json(state->second, tensors.path().string(),
                         [&](const std::string& own) { return tensors.tensor(layout::kRankPrefix + own); });
}

NamedTensors CheckpointReader::weights() const {
  const SafetensorsFile& weights = file(layout::kWeights);
  NamedTensors tensors;
  for (const auto& entry : weights.entries()) tensors.emplace_back(entry.name, weights.tensor(entry.name));
  return tensors;
}

NamedTensors CheckpointReader::finished_weights() const {
  NamedTensors weights = this->weights();
  for (auto& [name, tensor] : weights) {
    if (!parts_.contains(name)) continue;
    const StateTensors state = read(name, 0, tensor.numel());
    const bool is_average = state.contains("raw");  // a "master" is of the weights that are trained
    for (const std::string_view better : {"average", "master"}) {
      const auto found = is_average && better != "average" ? state.end() : state.find(better);
      if (found != state.end()) tensor = found->second.as_strided(tensor.sizes(), strides_of(name, tensor));
    }
  }
  return weights;
}

// The strides in which the optimizer state of `parameter` was saved.
std::vector<int64_t> CheckpointReader::strides_of(const std::string& parameter, const at::Tensor& weight) const {
  const auto* saved = run_.find<std::string>("strategy/state/strides/" + parameter);
  if (saved == nullptr) return weight.strides().vec();
  const auto strides = parse_strides(*saved);
  if (strides && fit(weight.sizes(), *strides)) return *strides;
  throw CheckpointError(fmt::format("{}: the strides of '{}', of shape [{}], are {}", folder_.string(), parameter,
                                    fmt::join(weight.sizes(), ","), quote(*saved)));
}

StateTensors CheckpointReader::read(const std::string& parameter, int64_t begin, int64_t end) const {
  const auto found = parts_.find(parameter);
  const auto missing = [&](std::string_view what) {
    return CheckpointError(fmt::format("{}: elements {} to {} of the optimizer state of '{}' {}", folder_.string(),
                                       begin, end, parameter, what));
  };
  if (found == parts_.end()) throw missing("are missing");
  StateTensors whole;
  int64_t position = begin;
  for (const Part& part : found->second) {
    if (part.end <= begin || part.begin >= end) continue;
    if (part.begin > position) throw missing("have a hole");
    const int64_t part_end = std::min(part.end, end);
    const StateTensors tensors = tensors_of(parameter, part);
    if (position > begin && tensors.size() != whole.size()) throw missing("are of different kinds");
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor wanted = tensor.narrow(0, position - part.begin, part_end - position);
      if (position == begin && part_end == end) {
        whole.emplace(name, wanted);
        continue;
      }
      if (position == begin) whole.emplace(name, at::empty({end - begin}, tensor.options()));
      const auto place = whole.find(name);
      if (place == whole.end()) throw missing("are of different kinds");
      place->second.narrow(0, position - begin, part_end - position).copy_(wanted);
    }
    position = part_end;
  }
  if (position < end) throw missing("are missing");
  return whole;
}

// All state tensors that a rank has written of the range, by name. An optimizer may have none: SGD without momentum.
StateTensors CheckpointReader::tensors_of(const std::string& parameter, const Part& part) const {
  file(part.file);
  const auto tensors = range_tensors_.find(range_key(parameter, part.begin, part.end));
  return tensors == range_tensors_.end() ? StateTensors() : tensors->second;
}

const SafetensorsFile& CheckpointReader::file(const std::string& name) const {
  const auto known = files_.find(name);
  if (known != files_.end()) return *known->second;
  check(name);
  auto opened = std::make_unique<SafetensorsFile>(folder_ / name);
  for (const auto& entry : opened->entries()) {
    const auto range = name == layout::kWeights ? std::nullopt : layout::parse_range_name(entry.name);
    if (!range) continue;
    const at::Tensor tensor = opened->tensor(entry.name);
    if (tensor.dim() != 1 || tensor.numel() != range->end - range->begin) {
      throw CheckpointError(
          fmt::format("{}: tensor '{}' has another size than its name says", opened->path().string(), entry.name));
    }
    range_tensors_[range_key(range->parameter, range->begin, range->end)].emplace(range->tensor, tensor);
  }
  return *files_.emplace(name, std::move(opened)).first->second;
}

void CheckpointReader::check(const std::string& name) const {
  const Manifest::File* file = manifest_.find_file(name);
  if (file == nullptr) {
    throw CheckpointError(fmt::format("{}: the manifest names no '{}'", folder_.string(), name));
  }
  if (const auto damage = find_damage(folder_, *file, verify_)) {
    throw CheckpointError(fmt::format("{} is damaged: {}; take an older checkpoint", folder_.string(), *damage));
  }
}

}  // namespace fulgur
