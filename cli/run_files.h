#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "fulgur/cli/parse.h"
#include "fulgur/core/callback.h"

namespace fulgur {

inline constexpr std::string_view kLatestRun = "latest";  // the link to the newest run

// Writes into the run's folder, when fit starts, what it takes to run it again:
//   config.toml  all options of the program; a run that resumes in a folder with other options writes config-v1.toml,
//                config-v2.toml, ... and says what is different
//   env.json     where it runs: command line, git commit, versions, host, devices, strategy with the memory that it
//                takes, number of ranks, and from which optimizer step to which, if that is known; likewise
//                env-v1.json
//   log.txt      what is printed from now on (copy_output_to in base/logging.h); log-rank1.txt, ... of other ranks
// and lets the link `latest` beside the folder point to it. Nothing is overwritten. Throws CheckpointError.
class RunFiles final : public Callback {
 public:
  // `command_line`: as a shell takes it. Unless `is_quiet` it prints the folder.
  RunFiles(ParsedCommandLine parsed, std::string command_line, bool is_quiet)
      : parsed_(std::move(parsed)), command_line_(std::move(command_line)), is_quiet_(is_quiet) {}

  bool runs_in_fast_dev_run() const override { return false; }
  void on_fit_start(TrainerControl& trainer) override;

  int64_t first_step() const { return first_step_; }  // optimizer steps before this fit; 0 before it starts
  const std::filesystem::path& config_file() const {
    return config_file_;
  }  // empty before fit starts, and on other ranks

 private:
  ParsedCommandLine parsed_;
  std::string command_line_;
  bool is_quiet_;
  int64_t first_step_ = 0;
  std::filesystem::path config_file_;
};

}  // namespace fulgur
