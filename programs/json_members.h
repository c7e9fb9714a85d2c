#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace fulgur::program {

// Readers of the values in a program's model.json. All throw BadJson that says what is there instead.

// A member of an object.
const nlohmann::json& member(const nlohmann::json& object, const char* name);
const nlohmann::json& array(const nlohmann::json& object, const char* name);
const nlohmann::json& object(const nlohmann::json& parent, const char* name);
const std::string& text(const nlohmann::json& object, const char* name);

const std::string& to_text(const nlohmann::json& value);
int64_t to_int(const nlohmann::json& value);
double to_double(const nlohmann::json& value);
bool to_bool(const nlohmann::json& value);

// The one member of an object that holds one of several kinds of value: {"as_int": 3}.
std::pair<std::string, const nlohmann::json*> the_member(const nlohmann::json& choice);

// A path of modules, such as "layers.0", or the name of a tensor in one: each part becomes a module within the last.
void check_path(const std::string& path);

}  // namespace fulgur::program
