#include "fulgur/cli/run_files.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/base/toml_file.h"
#include "fulgur/base/working_directory.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/numbered_files.h"
#include "fulgur/doctor/environment.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

void write_new_file(const fs::path& path, const std::string& text) {
  TemporaryFile file(path);
  file.writer().write(text.data(), text.size());
  file.commit();
}

using Values = std::map<std::string, std::string>;

// "trainer.max_epochs: 5 -> 10" for each value that is not the same. Settings of what was not chosen before, such as
// those of another strategy, are told only if they are among `set`.
std::vector<std::string> changes(const Values& before, const Values& after, const std::vector<std::string>& set) {
  std::vector<std::string> found;
  for (const auto& [name, is] : after) {
    const auto was = before.find(name);
    if (was != before.end() && was->second != is) found.push_back(fmt::format("{}: {} -> {}", name, was->second, is));
    if (was == before.end() && std::ranges::find(set, name) != set.end()) found.push_back(name + ": " + is);
  }
  return found;
}

// Returns the file that has the options.
fs::path write_config(const fs::path& folder, const ParsedCommandLine& parsed) {
  const fs::path last = last_numbered(folder, "config", ".toml"), next = next_numbered(folder, "config", ".toml");
  write_new_file(next, parsed.config);
  if (last.empty()) return next;
  std::vector<std::string> problems;  // cannot occur: this class has written both files
  const Values before = read_toml_values(last, problems), after = read_toml_values(next, problems);
  if (before == after) {
    fs::remove(next);
    return last;
  }
  log_info("this run has other options than the last one in its folder ({} has them all): {}", next.filename().string(),
           fmt::join(changes(before, after, parsed.set), ", "));
  return next;
}

}  // namespace

void RunFiles::on_fit_start(TrainerControl& trainer) {
  first_step_ = trainer.state().global_step;
  const fs::path& folder = trainer.run_dir();
  const std::string log = trainer.is_global_zero() ? "log.txt" : fmt::format("log-rank{}.txt", trainer.global_rank());
  copy_output_to((folder / log).string());
  if (!trainer.is_global_zero()) return;
  if (!is_quiet_) std::cout << fmt::format("{}\n", short_path(folder).string()) << std::flush;
  config_file_ = write_config(folder, parsed_);

  const std::string memory = trainer.memory_summary();
  const auto num_steps = trainer.state().estimated_stepping_batches;
  nlohmann::ordered_json environment{
      {"started", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
      {"command_line", command_line_},
      {"strategy_and_devices", trainer.device_summary()},
      {"memory_of_strategy", memory.empty() ? nlohmann::json() : nlohmann::json(memory)},
      {"world_size", trainer.world_size()},
      {"first_step", first_step_},
      {"estimated_stepping_batches", num_steps ? nlohmann::json(*num_steps) : nlohmann::json()}};
  environment.update(doctor::describe_environment(folder));
  if (!environment["git_commit"].is_null()) {
    environment["git_has_changes"] = !doctor::output_of("git status --porcelain 2>/dev/null | head -1").empty();
  }
  const std::string text = environment.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
  write_new_file(next_numbered(folder, "env", ".json"), text + "\n");
  replace_link_atomically(folder.parent_path() / kLatestRun, folder.filename());
}

}  // namespace fulgur
