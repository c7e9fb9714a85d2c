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

// What one rank knows of a run that an exception has ended.
struct PostMortem {
  std::string error{};  // text_of() the exception
  RunState state{};
  int64_t rank = 0, world_size = 1;
  std::string strategy_and_devices{};
  std::vector<std::string> places{};  // where the ranks are (World::places)
  Batch batch{};                      // the batch that was running; empty: no batch was running
  bool can_read_devices = true;       // false: values on an accelerator may never arrive, and are left out
  Metrics metrics{};                  // the last value of each metric
  TrainerOptions options{};
};

// Writes rank-<rank>.json into `folder`, which is created unless it exists. The file has all that PostMortem has, a
// copy of config.toml from `run_dir`, the spans of base/trace.h that ended last, and the environment. A tensor of the
// batch is described by its name, shape, type, device, lowest and highest finite value, and the number of values that
// are not finite. Nothing is overwritten. Errors: a part that cannot be determined is replaced by the reason; throws if
// the file cannot be written.
void write_post_mortem(const PostMortem& found, const std::filesystem::path& run_dir,
                       const std::filesystem::path& folder);

// A name for the folder of a post-mortem in a run's folder. That of an earlier run, which has failed and which this one
// resumes, stays as it is.
std::string free_post_mortem_name(const std::filesystem::path& run_dir);

}  // namespace fulgur
