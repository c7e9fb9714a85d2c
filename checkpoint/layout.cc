#include "fulgur/checkpoint/layout.h"

#include <fmt/format.h>

#include <charconv>

namespace fulgur::layout {
namespace {

std::optional<int64_t> parse_whole(std::string_view text) {
  int64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || rest != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace

std::string rank_file(int64_t rank, int64_t world_size) {
  return fmt::format("optimizer-{}-of-{}.safetensors", rank, world_size);
}

std::string to_string(const RangeName& name) {
  return fmt::format("{}:{}[{}:{}]", name.parameter, name.tensor, name.begin, name.end);
}

// The name of the parameter may contain ':', '[' and ']'; the other parts cannot.
std::optional<RangeName> parse_range_name(std::string_view text) {
  constexpr auto kNone = std::string_view::npos;
  const size_t open = text.rfind('['), colon = text.rfind(':');
  if (!text.ends_with(']') || open == kNone || colon == kNone || colon < open) return std::nullopt;
  const size_t tensor = text.substr(0, open).rfind(':');
  if (tensor == kNone) return std::nullopt;
  const auto begin = parse_whole(text.substr(open + 1, colon - open - 1));
  const auto end = parse_whole(text.substr(colon + 1, text.size() - colon - 2));
  if (!begin || !end || *begin > *end) return std::nullopt;
  return RangeName{std::string(text.substr(0, tensor)), std::string(text.substr(tensor + 1, open - tensor - 1)), *begin,
                   *end};
}

}  // namespace fulgur::layout
