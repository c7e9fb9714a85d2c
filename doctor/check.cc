#include "fulgur/doctor/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

namespace fulgur::doctor {
namespace {

std::string_view name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::good:
      return "good";
    case Verdict::warning:
      return "warning";
    case Verdict::problem:
      return "problem";
  }
  return "";
}

std::string marked(const Check& check) {
  return check.verdict == Verdict::good ? check.found : fmt::format("{}: {}", name_of(check.verdict), check.found);
}

// `text` in lines of at most `width` columns, each after the first behind `indent` spaces.
std::string wrapped(const std::string& text, size_t width, size_t indent) {
  std::istringstream words(text);
  std::string all;
  size_t column = indent;
  for (std::string word; words >> word;) {
    const bool fits = column + (all.empty() ? 0 : 1) + word.size() <= width;
    if (!all.empty()) all += fits ? " " : "\n" + std::string(indent, ' ');
    column = (fits || all.empty() ? column + (all.empty() ? 0 : 1) : indent) + word.size();
    all += word;
  }
  return all;
}

}  // namespace

bool any_problem(const Checks& checks) {
  return std::ranges::any_of(checks, [](const Check& check) { return check.verdict == Verdict::problem; });
}

std::string to_text(const Checks& checks, size_t width) {
  size_t longest = 0;
  for (const Check& check : checks) longest = std::max(longest, check.topic.size());
  const bool is_narrow = width < 2 * longest;  // then each text begins on a line of its own
  const size_t indent = is_narrow ? 2 : longest + 2;
  std::string text;
  for (const Check& check : checks) {
    text += is_narrow ? fmt::format("{}\n  ", check.topic) : fmt::format("{:<{}}", check.topic, indent);
    text += wrapped(marked(check), width, indent) + "\n";
    if (!check.advice.empty()) {
      text += std::string(indent, ' ') + wrapped(check.advice, width, indent) + "\n";
    }
  }
  return text;
}

std::string to_line(const Check& check) {
  return check.advice.empty() ? marked(check) : fmt::format("{}; {}", marked(check), check.advice);
}

std::string to_json(const Checks& checks) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Check& check : checks) {
    list.push_back({{"topic", check.topic},
                    {"found", check.found},
                    {"verdict", name_of(check.verdict)},
                    {"advice", check.advice}});
  }
  const nlohmann::ordered_json all{{"works", !any_problem(checks)}, {"checks", list}};
  return all.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace fulgur::doctor
