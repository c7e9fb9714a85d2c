#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/run_state.h"
#include "fulgur/trainer/trainer_options.h"

namespace fulgur {

// What is known of a run that an exception has ended, on one rank.
struct PostMortem {
  std::string error{};  // text_of() the exception
  RunState state{};
  int64_t rank = 0, world_size = 1;
  std::string strategy_and_devices{};
  std::vector<std::string> places{};  // where the ranks are (World::places)
  Batch batch{};                      // the one that was running; empty: none was
  bool can_read_devices = true;       // false: values on an accelerator may never arrive, and are left out
  Metrics metrics{};                  // the last value of each
  TrainerOptions options{};
};

// Writes rank-<rank>.json into the folder, which is created unless it exists; `run_dir`: the folder of the run, whose
// config.toml is copied. The file has all that PostMortem has, of each tensor of the batch the name, shape, type,
// device, lowest and highest finite value and the number of values that are not finite, the spans of trace.h that ended
// last, and the environment. Nothing is overwritten. Errors: what cannot be found out is left out, with the reason;
// throws if the file cannot be written.
void write_post_mortem(const PostMortem& found, const std::filesystem::path& run_dir,
                       const std::filesystem::path& folder);

}  // namespace fulgur
