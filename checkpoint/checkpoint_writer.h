#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/state_range.h"
#include "core/state.h"
#include "distributed/collective.h"

namespace fulgur {

// What one rank gives to a checkpoint.
struct CheckpointContent {
  NamedTensors weights{};  // parameters and buffers; rank 0's are written
  std::vector<std::pair<std::string, std::string>>
      aliases{};                     // further names of tied ones, and the name they are under
  State run{};                       // of all ranks; rank 0's is written
  State rank{};                      // of this rank
  std::vector<StateRange> ranges{};  // all ranks' together: each element once, or none
};

// Copies on the host, so that the run can go on while they are written.
void make_independent(CheckpointContent& content);

// Writes a checkpoint, every rank of `group` its part and at the same time: the folder appears whole or not at all, and
// when this returns it is there. All ranks must see the same file system. Beyond the content no more than a tensor is
// held. Throws on every rank, naming path and reason: CheckpointError if one rank cannot write or the folder exists;
// DistributedError.
//   manifest.json                               written last; checkpoint/manifest.h
//   model.safetensors                           the weights, by name
//   state.json, state.safetensors               of the run; tensors in the second, which is there if there are any
//   optimizer-<rank>-of-<world>.safetensors     ranges as "<parameter>:<tensor>[begin:end]", and the rank's state
// Then the `links`, names beside the folder, point to it instead of to what they pointed to.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointContent& content, Collective& group,
                      const std::vector<std::string>& links = {});

}  // namespace fulgur
