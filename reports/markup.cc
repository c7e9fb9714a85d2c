#include "fulgur/reports/markup.h"

#include <nlohmann/json.hpp>

namespace fulgur {

std::string escape_html(std::string_view text) {
  // Only JSON's writer knows how to replace what is no UTF-8.
  const auto replace = nlohmann::json::error_handler_t::replace;
  const auto valid = nlohmann::json::parse(nlohmann::json(text).dump(-1, ' ', false, replace)).get<std::string>();
  std::string escaped;
  for (const char c : valid) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

}  // namespace fulgur
