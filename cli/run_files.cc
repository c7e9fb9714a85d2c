#include "fulgur/cli/run_files.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"
#include "fulgur/base/version.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/cli/toml_file.h"
#include "fulgur/doctor/check.h"
#include "fulgur/doctor/host_checks.h"

namespace fulgur {
namespace {

namespace fs = std::filesystem;

void write_new_file(const fs::path& path, const std::string& text) {
  TemporaryFile file(path);
  file.writer().write(text.data(), text.size());
  file.commit();
}

// The first of stem.ext, stem-v1.ext, stem-v2.ext, ... that does not exist, and the last one that does.
struct Numbered {
  fs::path free;
  std::optional<fs::path> last{};
};

Numbered numbered(const fs::path& folder, std::string_view stem, std::string_view extension) {
  Numbered found{.free = folder / fmt::format("{}{}", stem, extension)};
  for (int i = 1; fs::exists(found.free); ++i) {
    found.last = found.free;
    found.free = folder / fmt::format("{}-v{}{}", stem, i, extension);
  }
  return found;
}

// "trainer.max_epochs: 5 -> 10" for each value that is not the same.
std::vector<std::string> changes(const std::map<std::string, std::string>& before,
                                 const std::map<std::string, std::string>& after) {
  std::vector<std::string> found;
  const auto value_in = [](const auto& values, const std::string& name) {
    const auto entry = values.find(name);
    return entry == values.end() ? std::string("not there") : entry->second;
  };
  auto names = before;
  names.insert(after.begin(), after.end());
  for (const auto& [name, value] : names) {
    const std::string was = value_in(before, name), is = value_in(after, name);
    if (was != is) found.push_back(fmt::format("{}: {} -> {}", name, was, is));
  }
  return found;
}

void write_config(const fs::path& folder, const std::string& config) {
  const Numbered files = numbered(folder, "config", ".toml");
  write_new_file(files.free, config);
  if (!files.last) return;
  std::vector<std::string> problems;  // cannot occur: this class has written both files
  const auto changed = changes(read_toml_values(*files.last, problems), read_toml_values(files.free, problems));
  if (changed.empty()) {
    fs::remove(files.free);
    return;
  }
  log_info("this run goes on with other options ({} has them all): {}", files.free.filename().string(),
           fmt::join(changed, ", "));
}

// What a command prints, without the newline; empty if it fails.
std::string output_of(const char* command) {
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return "";
  std::string text;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
  if (pclose(pipe) != 0) return "";
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : std::string();
}

}  // namespace

fs::path short_path(const fs::path& path) {
  const fs::path relative = fs::proximate(path);
  return relative.string().starts_with("..") ? path : relative;
}

void RunFiles::on_fit_start(TrainerControl& trainer) {
  first_step_ = trainer.state().global_step;
  const fs::path& folder = trainer.run_dir();
  const std::string log = trainer.is_global_zero() ? "log.txt" : fmt::format("log-rank{}.txt", trainer.global_rank());
  copy_output_to((folder / log).string());
  if (!trainer.is_global_zero()) return;
  if (!is_quiet_) std::cout << fmt::format("{}\n", short_path(folder).string()) << std::flush;
  write_config(folder, config_);

  const std::string commit = output_of("git rev-parse HEAD 2>/dev/null");
  const bool is_changed = !output_of("git status --porcelain 2>/dev/null | head -1").empty();
  const auto num_steps = trainer.state().estimated_stepping_batches;
  nlohmann::ordered_json environment{
      {"started", fmt::format("{:%FT%TZ}", fmt::gmtime(std::time(nullptr)))},
      {"command_line", command_line_},
      {"folder", fs::current_path().string()},
      {"git_commit", commit.empty() ? nlohmann::json() : nlohmann::json(commit)},
      {"git_has_changes", commit.empty() ? nlohmann::json() : nlohmann::json(is_changed)},
      {"fulgur", version()},
      {"libtorch", TORCH_VERSION},
      {"compiler", __VERSION__},
      {"host", host_name()},
      {"process", getpid()},
      {"strategy_and_devices", trainer.device_summary()},
      {"world_size", trainer.world_size()},
      {"first_step", first_step_},
      {"estimated_stepping_batches", num_steps ? nlohmann::json(*num_steps) : nlohmann::json()}};
  for (const doctor::Check& check : doctor::check_host({.folder = folder})) environment[check.topic] = check.found;
  const std::string text = environment.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
  write_new_file(numbered(folder, "env", ".json").free, text + "\n");
  replace_link_atomically(folder.parent_path() / "latest", folder.filename());
}

}  // namespace fulgur
