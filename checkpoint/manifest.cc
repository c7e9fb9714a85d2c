#include "fulgur/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/limits.h"
#include "fulgur/checkpoint/migrations.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // keeps the order of fields

// Reads one object, in which every field must be known.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string what) : object_(object), what_(std::move(what)) {
    if (!object.is_object()) throw BadJson(what_ + " is not an object");
  }

  std::string text(const char* name) { return at(name, &nlohmann::json::is_string, "a text").get<std::string>(); }

  std::string text_or_empty(const char* name) { return object_.contains(name) ? text(name) : ""; }

  int64_t count(const char* name) { return to_count(at(name, &nlohmann::json::is_number, "a number"), name); }

  std::vector<int64_t> counts(const char* name) {
    std::vector<int64_t> values;
    for (const auto& value : array(name)) values.push_back(to_count(value, name));
    return values;
  }

  const nlohmann::json& array(const char* name) { return at(name, &nlohmann::json::is_array, "a list"); }

  void check_no_more() const {
    if (object_.size() == num_read_) return;
    throw BadJson(fmt::format("{} has other fields than those of format version {}", what_, Manifest::kFormatVersion));
  }

 private:
  const nlohmann::json& at(const char* name, bool (nlohmann::json::*is_wanted)() const noexcept,
                           std::string_view wanted) {
    const auto field = object_.find(name);
    if (field == object_.end()) throw BadJson(fmt::format("{} has no '{}'", what_, name));
    if (!((*field).*is_wanted)()) throw BadJson(fmt::format("'{}' of {} is not {}", name, what_, wanted));
    ++num_read_;
    return *field;
  }

  int64_t to_count(const nlohmann::json& value, const char* name) const {
    if (value.is_number_unsigned() && value.get<uint64_t>() < uint64_t{1} << 63) return value.get<int64_t>();
    throw BadJson(fmt::format("'{}' of {} is not a number from 0 to 2^63", name, what_));
  }

  const nlohmann::json& object_;
  std::string what_;
  size_t num_read_ = 0;
};

std::string to_hex(uint64_t value) { return fmt::format("{:016x}", value); }

uint64_t from_hex(const std::string& text, const std::string& file) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size() || text != to_hex(value)) {
    throw BadJson(fmt::format("xxh3 of {} is not 16 hexadecimal digits", quote(file)));
  }
  return value;
}

Manifest::File read_file(const nlohmann::json& json) {
  Fields fields(json, "a file");
  Manifest::File file{.name = fields.text("name"), .num_bytes = fields.count("num_bytes")};
  file.xxh3 = from_hex(fields.text("xxh3"), file.name);
  fields.check_no_more();
  return file;
}

Manifest::Parameter read_parameter(const nlohmann::json& json) {
  Fields fields(json, "a parameter");
  Manifest::Parameter parameter{.name = fields.text("name"),
                                .dtype = fields.text("dtype"),
                                .shape = fields.counts("shape"),
                                .alias_of = fields.text_or_empty("alias_of")};
  fields.check_no_more();
  return parameter;
}

Manifest::Range read_range(const nlohmann::json& json) {
  Fields fields(json, "a range");
  Manifest::Range range{.parameter = fields.text("parameter"),
                        .begin = fields.count("begin"),
                        .end = fields.count("end"),
                        .file = fields.text("file")};
  fields.check_no_more();
  return range;
}

template <class T>
std::vector<T> read_all(const nlohmann::json& array, T (*read)(const nlohmann::json&)) {
  std::vector<T> items;
  for (const auto& item : array) items.push_back(read(item));
  return items;
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name != kManifestName && name.size() <= 255 &&
         name.find('/') == name.npos && name.find('\0') == name.npos;
}

std::set<std::string_view> check_files(const Manifest& manifest) {
  std::set<std::string_view> names;
  for (const auto& file : manifest.files) {
    if (!is_plain_name(file.name)) {
      throw BadJson(fmt::format("{} is not the name of a file in the checkpoint's folder", quote(file.name)));
    }
    if (!names.insert(file.name).second) throw BadJson(fmt::format("file {} is there twice", quote(file.name)));
  }
  return names;
}

int64_t numel_of(const Manifest::Parameter& parameter) {
  int64_t product = 1;
  for (const int64_t size : parameter.shape) {
    if (__builtin_mul_overflow(product, size, &product)) {
      throw BadJson(fmt::format("the shape of parameter {} is too large", quote(parameter.name)));
    }
  }
  return product;
}

using ParametersByName = std::map<std::string_view, const Manifest::Parameter*>;

ParametersByName check_parameters(const Manifest& manifest) {
  ParametersByName by_name;
  for (const auto& parameter : manifest.parameters) {
    if (!by_name.emplace(parameter.name, &parameter).second) {
      throw BadJson(fmt::format("parameter {} is there twice", quote(parameter.name)));
    }
  }
  for (const auto& alias : manifest.parameters) {
    if (alias.alias_of.empty()) continue;
    const auto original = by_name.find(alias.alias_of);
    if (original == by_name.end() || !original->second->alias_of.empty() || original->second->dtype != alias.dtype ||
        original->second->shape != alias.shape) {
      throw BadJson(fmt::format("parameter {} is an alias of {}, which is not such a parameter", quote(alias.name),
                                quote(alias.alias_of)));
    }
  }
  return by_name;
}

void check_ranges(const Manifest& manifest, const std::set<std::string_view>& files,
                  const ParametersByName& parameters) {
  std::map<std::string_view, std::vector<std::pair<int64_t, int64_t>>> ranges_of;
  for (const auto& range : manifest.ranges) {
    const auto parameter = parameters.find(range.parameter);
    const std::string shown = fmt::format("range [{}, {}) of {}", range.begin, range.end, quote(range.parameter));
    if (parameter == parameters.end()) throw BadJson(shown + ": there is no such parameter");
    if (!parameter->second->alias_of.empty()) throw BadJson(shown + ": that is an alias");
    if (!files.contains(range.file)) throw BadJson(shown + ": there is no file " + quote(range.file));
    if (range.begin >= range.end) throw BadJson(shown + " is empty");
    ranges_of[range.parameter].emplace_back(range.begin, range.end);
  }
  for (auto& [name, ranges] : ranges_of) {
    std::sort(ranges.begin(), ranges.end());
    int64_t position = 0;
    for (const auto& [begin, end] : ranges) {
      if (begin != position) {
        throw BadJson(fmt::format("the ranges of parameter {} {} at element {}", quote(name),
                                  begin < position ? "overlap" : "leave a hole", std::min(begin, position)));
      }
      position = end;
    }
    const int64_t numel = numel_of(*parameters.at(name));
    if (position != numel) {
      throw BadJson(fmt::format("the ranges of parameter {} end at element {} of {}", quote(name), position, numel));
    }
  }
}

void check(const Manifest& manifest) {
  if (manifest.world_size < 1) throw BadJson("world_size is 0");
  const auto files = check_files(manifest);
  const auto parameters = check_parameters(manifest);
  std::for_each(manifest.parameters.begin(), manifest.parameters.end(), numel_of);
  check_ranges(manifest, files, parameters);
}

Manifest read_manifest(nlohmann::json& json) {
  if (!json.is_object() || !json.contains("format_version") || !json["format_version"].is_number_unsigned()) {
    throw BadJson("there is no format_version: this is no manifest of a checkpoint");
  }
  const auto version = json["format_version"].get<uint64_t>();
  if (version > Manifest::kFormatVersion) {
    throw BadJson(
        fmt::format("the checkpoint has format version {}, from a later fulgur; this one reads versions up to "
                    "{}. Read it with that fulgur, or take its model.safetensors for the weights alone",
                    version, Manifest::kFormatVersion));
  }
  migrate(json, static_cast<int64_t>(version), Manifest::kFormatVersion, manifest_migrations());
  Fields fields(json, "the manifest");
  fields.count("format_version");
  Manifest manifest{.fulgur_version = fields.text_or_empty("fulgur_version"),
                    .world_size = fields.count("world_size"),
                    .files = read_all(fields.array("files"), &read_file),
                    .parameters = read_all(fields.array("parameters"), &read_parameter),
                    .ranges = read_all(fields.array("ranges"), &read_range)};
  fields.check_no_more();
  check(manifest);
  return manifest;
}

Json to_json(const Manifest::File& file) {
  return {{"name", file.name}, {"num_bytes", file.num_bytes}, {"xxh3", to_hex(file.xxh3)}};
}

Json to_json(const Manifest::Parameter& parameter) {
  Json json = {{"name", parameter.name}, {"dtype", parameter.dtype}, {"shape", parameter.shape}};
  if (!parameter.alias_of.empty()) json["alias_of"] = parameter.alias_of;
  return json;
}

Json to_json(const Manifest::Range& range) {
  return {{"parameter", range.parameter}, {"begin", range.begin}, {"end", range.end}, {"file", range.file}};
}

// One item per line.
template <class T>
std::string to_text(const std::vector<T>& items) {
  std::string text = "[";
  for (const T& item : items) text += (text.size() == 1 ? "\n    " : ",\n    ") + to_json(item).dump();
  return text + (items.empty() ? "]" : "\n  ]");
}

std::string to_text(const Manifest& manifest) try {
  const std::string version = manifest.fulgur_version.empty()
                                  ? ""
                                  : fmt::format("  \"fulgur_version\": {},\n", Json(manifest.fulgur_version).dump());
  return fmt::format(
      "{{\n  \"format_version\": {},\n{}  \"world_size\": {},\n  \"files\": {},\n  \"parameters\": {},\n  "
      "\"ranges\": {}\n}}\n",
      Manifest::kFormatVersion, version, manifest.world_size, to_text(manifest.files), to_text(manifest.parameters),
      to_text(manifest.ranges));
} catch (const Json::type_error& error) {
  throw CheckpointError(fmt::format("a name in the checkpoint is not UTF-8: {}", error.what()));
}

template <class T>
const T* find_by_name(const std::vector<T>& items, std::string_view name) {
  const auto item = std::find_if(items.begin(), items.end(), [&](const T& each) { return each.name == name; });
  return item == items.end() ? nullptr : &*item;
}

}  // namespace

const Manifest::File* Manifest::find_file(std::string_view name) const { return find_by_name(files, name); }

const Manifest::Parameter* Manifest::find_parameter(std::string_view name) const {
  return find_by_name(parameters, name);
}

std::string to_json(const Manifest& manifest) {
  std::string text = to_text(manifest);
  parse_manifest(text, kManifestName);
  return text;
}

Manifest parse_manifest(std::string_view text, std::string_view file) {
  nlohmann::json json = parse_json(text, file);
  try {
    return read_manifest(json);
  } catch (const BadJson& error) {
    throw CheckpointError(fmt::format("{}: {}", file, error.what()));
  }
}

bool is_checkpoint(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / kManifestName, ignored);
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path file = folder / kManifestName;
  return parse_manifest(read_text_file(file, limits::kManifestBytes), file.string());
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  write_text_file(folder / kManifestName, to_json(manifest), limits::kManifestBytes);
}

std::optional<std::string> find_damage(const fs::path& folder, const Manifest::File& file, VerifyOptions options) {
  std::error_code error;
  const auto num_bytes = fs::file_size(folder / file.name, error);
  if (error) return fmt::format("{}: {}", file.name, error.message());
  if (num_bytes != static_cast<uint64_t>(file.num_bytes)) {
    return fmt::format("{} has {} bytes, the manifest says {}", file.name, num_bytes, file.num_bytes);
  }
  if (!options.digests) return std::nullopt;
  try {
    const uint64_t xxh3 = digest_of(folder / file.name, options.on_read).xxh3;
    if (xxh3 == file.xxh3) return std::nullopt;
    return fmt::format("{} has xxh3 {}, the manifest says {}", file.name, to_hex(xxh3), to_hex(file.xxh3));
  } catch (const CheckpointError& unreadable) {
    return unreadable.what();
  }
}

void verify(const fs::path& folder, const Manifest& manifest, VerifyOptions options) {
  std::string damages;
  for (const auto& file : manifest.files) {
    if (const auto damage = find_damage(folder, file, options)) damages += "\n  " + *damage;
  }
  if (!damages.empty()) {
    throw CheckpointError(fmt::format("the checkpoint '{}' is damaged:{}", folder.string(), damages));
  }
}

}  // namespace fulgur
