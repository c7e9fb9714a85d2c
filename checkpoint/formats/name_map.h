#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fulgur {

// How the names of tensors in a foreign file become names of our module.
//   const NameMap names{.rules = {{"transformer.wte.weight", "embedding.weight"},
//                                 {"transformer.h.", "blocks."},        // ends with a dot: a prefix
//                                 {"lm_head.weight", std::nullopt}}};   // left out
// The first rule that fits decides; a name that no rule fits stays as it is. {"", "model."} fits every name.
struct NameMap {
  // A rule renames one tensor, or all whose names have a prefix in common.
  struct Rule {
    std::string from;               // a whole name; a prefix if it is empty or ends with '.'
    std::optional<std::string> to;  // replaces `from`; nullopt: the tensor is left out
  };

  std::optional<std::string> operator()(std::string_view name) const;  // nullopt: left out

  std::vector<Rule> rules;
};

}  // namespace fulgur
