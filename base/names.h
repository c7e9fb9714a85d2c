#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fulgur {

// Names that users type (strategies, flags): '-' and '_' are the same, and so are upper and lower case.
std::string canonical_name(std::string_view name);

// The known name that `asked` was probably meant to be: the one that stands for `asked` in Lightning (fsdp ->
// ddp_sharded), or the one with the smallest edit distance, if at most a third of the letters (at least one) differ;
// otherwise a name that contains `asked` (epochs -> max_epochs).
std::optional<std::string> nearest_name(std::string_view asked, std::span<const std::string> known);

// A message such as "unknown strategy 'dpp'; did you mean 'ddp'? known: ddp, single_device".
std::string unknown_name_message(std::string_view kind, std::string_view asked, std::span<const std::string> known);

}  // namespace fulgur
