#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors.h"

namespace fulgur {

// Files of Python's torch.save() and torch.load(), and of Lightning. New files appear complete or not at all; existing
// files are never replaced. Errors: CheckpointError that names the file and the reason.

// Writes a state dict that torch.load() accepts with weights_only=True, its default. Tensors that are the same view
// (tied weights) share memory in the file too; all others are written whole and separately. One tensor at a time is
// copied to the host. Throws also for a dtype without a storage type in Python: unsigned integers above 8 bits and
// 8-bit floats.
FileDigest write_torch_file(const std::filesystem::path& path, const NamedTensors& state_dict);

// Reads the tensors of a state dict that Python has saved (torch >= 1.6) as dict or OrderedDict, or of the state_dict
// in a Lightning .ckpt. The tensors are on the CPU, in the file's order. Executes nothing from the file.
NamedTensors read_torch_file(const std::filesystem::path& path);

// What Python's Lightning needs in a .ckpt: for LightningModule.load_from_checkpoint(), and for validate(), test(),
// predict() and fit() with ckpt_path. fit() resumes after the given epoch and step, with a fresh optimizer.
struct LightningCheckpoint {
  int64_t epoch = 0;        // epochs that are complete
  int64_t global_step = 0;  // optimizer steps taken
  NamedTensors state_dict;  // by the names of the Python module
  State hyper_parameters;   // arguments of the Python module's __init__, by name
};

FileDigest write_lightning_checkpoint(const std::filesystem::path& path, const LightningCheckpoint& checkpoint);

}  // namespace fulgur
