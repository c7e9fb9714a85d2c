#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "fulgur/checkpoint/memory_map.h"

namespace fulgur {

// The bytes of each entry of a `.pt2` archive, as views of the map, by the entry's name without the one folder that
// holds all of them: "models/model.json".
using ArchiveEntries = std::map<std::string, std::string_view>;

// The names of the programs of torch.export.save().
std::set<std::string> exported_programs(const ArchiveEntries& entries);

// The names of the models that AOTInductor has compiled; their code is in the archive.
std::set<std::string> compiled_models(const ArchiveEntries& entries);

// Throws CheckpointError if the file is no zip file, if two entries overlap or have the same name, or if one is
// compressed, which torch never does.
ArchiveEntries read_archive_entries(const MemoryMap& map);

}  // namespace fulgur
