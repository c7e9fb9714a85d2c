#include "fulgur/trainer/callback_states.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/type_name.h"
#include "fulgur/base/utf8.h"

namespace fulgur {
namespace {

std::string type_of(const Callback& callback) { return short_type_name(typeid(callback)); }

// A '/' would make a folder of names in a State, and JSON takes UTF-8 only, which a path need not be.
std::string escaped(std::string_view key) {
  const bool is_text = is_utf8(key);
  std::string escaped;
  for (const char c : key) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_safe = c != '/' && c != '%' && (byte < 0x80 || is_text);
    escaped += is_safe ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return escaped;
}

std::string key_of(const Callback& callback) {
  const std::string own = escaped(callback.state_key());
  return own.empty() ? type_of(callback) : fmt::format("{}{{{}}}", type_of(callback), own);
}

std::string numbered(const std::string& key, int number) {
  return number == 1 ? key : fmt::format("{}-{}", key, number);
}

// One key for each callback. Equal keys, of callbacks that had no state when the run began, are numbered.
std::vector<std::string> keys_of(const CallbackList& callbacks) {
  std::map<std::string, int> seen;
  std::vector<std::string> keys;
  for (const auto& callback : callbacks) {
    const std::string key = key_of(*callback);
    keys.push_back(numbered(key, ++seen[key]));
  }
  return keys;
}

// The keys that checkpoints of version 0 use.
std::vector<std::string> keys_by_order(const CallbackList& callbacks) {
  std::map<std::string, int> seen;
  std::vector<std::string> keys;
  for (const auto& callback : callbacks) {
    const std::string type = type_of(*callback);
    keys.push_back(numbered(type, ++seen[type]));
  }
  return keys;
}

std::set<std::string> names_in(const State& saved) {
  std::set<std::string> names;
  for (const auto& [name, value] : saved.values()) names.insert(name.substr(0, name.find('/')));
  return names;
}

bool is_of_type(const std::string& key, const std::string& type) {
  return key == type || key.starts_with(type + "{") || key.starts_with(type + "-");
}

// For each callback the name of its state in `saved`; empty if there is none.
std::vector<std::string> find_states(const CallbackList& callbacks, const std::set<std::string>& saved) {
  const std::vector<std::string> keys = keys_of(callbacks);
  std::vector<std::string> found = keys;
  const std::vector<std::string> by_order = keys_by_order(callbacks);
  for (size_t i = 0; i < callbacks.size(); ++i) {
    const std::string type = type_of(*callbacks[i]), second = numbered(type, 2);
    const auto is_of_this_type = [&](const std::string& key) { return is_of_type(key, type); };
    const bool is_alone = std::ranges::count_if(callbacks, [&](const auto& c) { return type_of(*c) == type; }) == 1 &&
                          std::ranges::count_if(saved, is_of_this_type) == 1;
    if (saved.contains(second) && std::ranges::count(keys, second) == 0) found[i] = by_order[i];
    if (is_alone) found[i] = *std::ranges::find_if(saved, is_of_this_type);
    if (!saved.contains(found[i])) found[i].clear();
  }
  return found;
}

}  // namespace

void check_state_keys(const CallbackList& callbacks) {
  std::set<std::string> seen;
  for (const auto& callback : callbacks) {
    if (callback->state().empty() || seen.insert(key_of(*callback)).second) continue;
    throw SetupError(fmt::format(
        "two callbacks would keep their states in a checkpoint under the same name, {}; give them different "
        "options, or, if the type is your own, override state_key()",
        key_of(*callback)));
  }
}

State states_of(const CallbackList& callbacks) {
  State states;
  const std::vector<std::string> keys = keys_of(callbacks);
  for (size_t i = 0; i < callbacks.size(); ++i) states.set_child(keys[i], callbacks[i]->state());
  return states;
}

void load_states(const CallbackList& callbacks, const State& saved, bool warns) {
  std::set<std::string> unclaimed = names_in(saved);
  const std::vector<std::string> names = find_states(callbacks, unclaimed);
  for (size_t i = 0; i < callbacks.size(); ++i) {
    if (!names[i].empty()) callbacks[i]->load_state(saved.child(names[i]));
    unclaimed.erase(names[i]);
  }
  if (unclaimed.empty() || !warns) return;
  log_warning("the checkpoint has the state of {}, which no callback of this run takes; it is lost with the next save",
              fmt::join(unclaimed, ", "));
}

bool has_same_callbacks(const CallbackList& callbacks, const State& saved) {
  const std::vector<std::string> keys = keys_of(callbacks);
  const std::set<std::string> names = names_in(saved);
  return std::ranges::all_of(names, [&](const std::string& name) { return std::ranges::count(keys, name) > 0; });
}

}  // namespace fulgur
