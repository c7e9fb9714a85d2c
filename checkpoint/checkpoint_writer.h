#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/state_range.h"
#include "fulgur/distributed/collective.h"

namespace fulgur {

// What one rank contributes to a checkpoint.
struct CheckpointContent {
  NamedTensors weights{};  // parameters and buffers; rank 0's are written
  std::vector<std::pair<std::string, std::string>>
      aliases{};                     // (further name of a tied tensor, name under which it is in `weights`)
  State run{};                       // state of the whole run; rank 0's is written
  State rank{};                      // state of this rank alone
  std::vector<StateRange> ranges{};  // over all ranks each element occurs once or not at all
};

// Copies all tensors to host memory, so that training can continue while the copies are written.
void make_independent(CheckpointContent& content);

// Writes a checkpoint. All ranks of `group` write their parts at the same time: the folder appears complete or not at
// all, and exists when the call returns. All ranks must see the same file system. Beyond the content at most one tensor
// is held in memory. Throws on every rank, naming path and reason: CheckpointError if one rank cannot write or the
// folder exists; DistributedError.
//   manifest.json                               written last; checkpoint/manifest.h
//   model.safetensors                           the weights, by name
//   state.json, state.safetensors               the state of the run; its tensors, if any, are in the second file
//   optimizer-<rank>-of-<world>.safetensors     ranges as "<parameter>:<tensor>[begin:end]", and the rank's state
// At the end each of the `links`, names in the parent folder, is created or changed to point to the new folder.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointContent& content, Collective& group,
                      const std::vector<std::string>& links = {});

}  // namespace fulgur
