#include "fulgur/programs/json_members.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "fulgur/checkpoint/formats/strict_json.h"

namespace fulgur::program {

using Json = nlohmann::json;

const Json& member(const Json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end()) throw BadJson(fmt::format("'{}' is missing", name));
  return *found;
}

const Json& array(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_array()) throw BadJson(fmt::format("'{}' is no array", name));
  return value;
}

const Json& object(const Json& parent, const char* name) {
  const Json& value = member(parent, name);
  if (!value.is_object()) throw BadJson(fmt::format("'{}' is no object", name));
  return value;
}

const std::string& to_text(const Json& value) {
  if (!value.is_string()) throw BadJson(fmt::format("{} is no text", quote(value.dump())));
  return value.get_ref<const std::string&>();
}

const std::string& text(const Json& object, const char* name) { return to_text(member(object, name)); }

int64_t to_int(const Json& value) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= std::numeric_limits<int64_t>::max());
  if (!fits) throw BadJson(fmt::format("{} is no whole number of 64 bits", quote(value.dump())));
  return value.get<int64_t>();
}

double to_double(const Json& value) {
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) throw BadJson(fmt::format("{} is no number", quote(value.dump())));
  return value.get<double>();
}

bool to_bool(const Json& value) {
  if (!value.is_boolean()) throw BadJson(fmt::format("{} is neither true nor false", quote(value.dump())));
  return value.get<bool>();
}

std::pair<std::string, const Json*> the_member(const Json& choice) {
  if (!choice.is_object() || choice.size() != 1) {
    throw BadJson(fmt::format("{} has not one member", quote(choice.dump())));
  }
  return {choice.begin().key(), &choice.begin().value()};
}

void check_path(const std::string& path) {
  constexpr int64_t kMaxDepth = 64;
  if (path.starts_with('.') || path.ends_with('.') || path.find("..") != path.npos) {
    throw BadJson(fmt::format("{} is no path of modules: a part is empty", quote(path)));
  }
  if (std::ranges::count(path, '.') >= kMaxDepth) {
    throw BadJson(fmt::format("{} is a module more than {} deep", quote(path), kMaxDepth));
  }
}

}  // namespace fulgur::program
