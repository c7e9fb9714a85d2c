#include "fulgur/base/names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

namespace fulgur {
namespace {

// Optimal string alignment: insertions, deletions, substitutions, and two neighbours swapped count 1 each.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

// Names by which Lightning, DeepSpeed or torch call what has another name here, both canonical.
constexpr std::pair<std::string_view, std::string_view> kElsewhere[] = {
    {"fsdp", "ddp_sharded"},
    {"deepspeed", "ddp_sharded"},
    {"deepspeed_stage_1", "ddp_sharded"},
    {"deepspeed_stage_2", "ddp_sharded"},
    {"deepspeed_stage_2_offload", "zero_offload"},
    {"deepspeed_stage_3", "ddp_sharded"},
    {"deepspeed_stage_3_offload", "zero_offload"},
    {"ddp_find_unused_parameters_true", "ddp"},
    {"ddp_spawn", "ddp"},
    {"fp16", "16_mixed"},
    {"float16", "16_mixed"},
    {"bfloat16", "bf16_mixed"},
    {"fp32", "32"},
    {"float32", "32"},
    {"fp64", "64"},
    {"gpus", "devices"},
    {"resume_from_checkpoint", "ckpt_path"},
    {"seed_everything", "seed"},
};

std::optional<std::string> name_here(std::string_view canonical, std::span<const std::string> known) {
  const auto other = std::ranges::find(kElsewhere, canonical, [](const auto& names) { return names.first; });
  if (other == std::end(kElsewhere)) return std::nullopt;
  const auto found = std::ranges::find(known, other->second, canonical_name);
  return found == known.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

std::string canonical_name(std::string_view name) {
  std::string canonical(name);
  for (char& c : canonical) c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return canonical;
}

std::optional<std::string> nearest_name(std::string_view asked, std::span<const std::string> known) {
  const std::string canonical = canonical_name(asked);
  if (auto here = name_here(canonical, known)) return here;
  std::optional<std::string> nearest;
  size_t smallest = std::max<size_t>(1, canonical.size() / 3) + 1;
  for (const std::string& name : known) {
    const size_t distance = edit_distance(canonical, canonical_name(name));
    if (distance < smallest) {
      smallest = distance;
      nearest = name;
    }
  }
  if (nearest || canonical.size() < 3) return nearest;
  const auto containing = std::ranges::find_if(
      known, [&](const std::string& name) { return canonical_name(name).find(canonical) != std::string::npos; });
  return containing == known.end() ? std::nullopt : std::optional(*containing);
}

std::string unknown_name_message(std::string_view kind, std::string_view asked, std::span<const std::string> known) {
  const auto nearest = nearest_name(asked, known);
  return fmt::format("unknown {} '{}';{} known: {}", kind, asked,
                     nearest ? fmt::format(" did you mean '{}'?", *nearest) : "", fmt::join(known, ", "));
}

}  // namespace fulgur
