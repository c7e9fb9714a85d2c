#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "checkpoint/file_system.h"
#include "checkpoint/safetensors.h"
#include "core/state.h"

namespace fulgur {

// Files of Python's torch.save() and torch.load(), and of Lightning. Errors: CheckpointError that names the file and
// the reason; files that exist are not replaced, and new ones are there whole or not at all.

// A state dict that torch.load() accepts with weights_only=True, its default. Tensors that are the same view (tied
// weights) share their memory there too; others are written whole and on their own. Each is brought to the host one at
// a time. Throws also for a dtype that has no storage type in Python: the unsigned ones beyond 8 bits and the 8-bit
// floats.
FileDigest write_torch_file(const std::filesystem::path& path, const NamedTensors& state_dict);

// The tensors of a state dict that Python has saved (torch >= 1.6), as dict or OrderedDict, or of the state_dict in a
// Lightning .ckpt; on the CPU, in its order. Runs nothing that is in the file.
NamedTensors read_torch_file(const std::filesystem::path& path);

// What Python's Lightning needs of a .ckpt: for LightningModule.load_from_checkpoint(), and for validate(), test(),
// predict() and fit() with ckpt_path. fit() goes on after the epoch and step given, with a fresh optimizer.
struct LightningCheckpoint {
  int64_t epoch = 0;        // epochs that are complete
  int64_t global_step = 0;  // optimizer steps taken
  NamedTensors state_dict;  // by the names of the Python module
  State hyper_parameters;   // arguments of its __init__ by name
};

FileDigest write_lightning_checkpoint(const std::filesystem::path& path, const LightningCheckpoint& checkpoint);

}  // namespace fulgur
