#include "fulgur/programs/archive_entries.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/checkpoint/formats/strict_json.h"
#include "fulgur/checkpoint/formats/zip_directory.h"

namespace fulgur {
namespace {

// An entry's name, without the folder that holds all entries, and its bytes.
struct Entry {
  std::string name;
  std::string_view bytes;
};

void check_apart(std::vector<Entry> entries, std::string_view file) {
  std::ranges::sort(entries, {}, [](const Entry& entry) { return entry.bytes.data(); });
  const Entry* before = nullptr;
  for (const Entry& entry : entries) {
    if (entry.bytes.empty()) continue;
    if (before != nullptr && before->bytes.data() + before->bytes.size() > entry.bytes.data()) {
      throw CheckpointError(
          fmt::format("{}: its entries {} and {} overlap", file, quote(before->name), quote(entry.name)));
    }
    before = &entry;
  }
}

}  // namespace

std::set<std::string> exported_programs(const ArchiveEntries& entries) {
  constexpr std::string_view kFolder = "models/", kEnding = ".json";
  std::set<std::string> names;
  for (const auto& [name, bytes] : entries) {
    if (!name.starts_with(kFolder) || !name.ends_with(kEnding)) continue;
    names.insert(name.substr(kFolder.size(), name.size() - kFolder.size() - kEnding.size()));
  }
  return names;
}

std::set<std::string> compiled_models(const ArchiveEntries& entries) {
  constexpr std::string_view kFolder = "data/aotinductor/";
  std::set<std::string> names;
  for (const auto& [name, bytes] : entries) {
    if (!name.starts_with(kFolder)) continue;
    const std::string rest = name.substr(kFolder.size());
    names.insert(rest.substr(0, rest.find('/')));
  }
  return names;
}

ArchiveEntries read_archive_entries(const MemoryMap& map) {
  const std::string file = map.path().string();
  const std::string_view bytes(map.bytes().data(), map.bytes().size());
  const ReadBytes read = [&](uint64_t begin, uint64_t num_bytes) {
    return std::string(bytes.substr(begin, num_bytes));
  };
  std::vector<Entry> all;
  ArchiveEntries by_name;
  for (const ZipEntry& entry : read_zip_directory(read, bytes.size(), file)) {
    if (entry.method != 0 || entry.is_encrypted || entry.stored_bytes != entry.num_bytes) {
      throw CheckpointError(
          fmt::format("{}: its entry {} is compressed, which torch never does", file, quote(entry.name)));
    }
    const uint64_t begin = zip_entry_begin(entry, read, bytes.size(), file);
    all.push_back({entry.name.substr(entry.name.find('/') + 1), bytes.substr(begin, entry.num_bytes)});
    if (!by_name.emplace(all.back().name, all.back().bytes).second) {
      throw CheckpointError(fmt::format("{}: two of its entries are called {}", file, quote(all.back().name)));
    }
  }
  check_apart(std::move(all), file);
  return by_name;
}

}  // namespace fulgur
