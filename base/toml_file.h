#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/setting.h"

namespace fulgur {

// Appends the settings of a TOML file, after those of the files that it includes: include = ["base.toml"], relative to
// the file. Tables become sections, lists of plain values become text with commas. Mistakes are appended to `problems`
// as "run.toml:3:1: ...": no such file, broken TOML, a value that no option can have, a file that includes itself.
void read_toml(const std::filesystem::path& file, std::vector<Setting>& settings, std::vector<std::string>& problems);

// The same for the text of a file; `name` is for messages.
void read_toml_text(std::string_view text, const std::filesystem::path& name, std::vector<Setting>& settings,
                    std::vector<std::string>& problems);

// What a TOML file sets, as text by name: "trainer.max_epochs", "callbacks[0].monitor". A value that no option can have
// is empty.
std::map<std::string, std::string> read_toml_values(const std::filesystem::path& file,
                                                    std::vector<std::string>& problems);

// `text` as a string of a TOML file, in quotes.
std::string toml_string(const std::string& text);

}  // namespace fulgur
