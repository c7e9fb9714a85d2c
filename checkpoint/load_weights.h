#pragma once

#include <filesystem>
#include <string_view>

#include "fulgur/base/field_state.h"
#include "fulgur/base/state.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/core/module_fwd.h"

namespace fulgur {

// Copies weights from any source into the parameters and buffers of a module, which may have another precision and be
// on any device:
//   load_weights(*model, read_huggingface("gpt2/", names), "gpt2/");
// With `strict` both must have the same names (one of the names suffices for tied tensors): otherwise throws a
// CheckpointError that lists missing and unexpected names. Without `strict` the list is logged. A different shape, or a
// different dtype unless both are floating, is an error in either case, before anything is copied. `source` begins the
// messages.
void load_weights(torch::nn::Module& module, const NamedTensors& weights, std::string_view source, bool strict = true);

// What Module::save_hyper_parameters has saved in a checkpoint, by name; empty if nothing was saved. Throws
// CheckpointError if there is no checkpoint.
State saved_hyper_parameters(const std::filesystem::path& folder);

// The options with which the module of a checkpoint was made, to construct it again:
//   const auto model = make_module<Gpt>(load_hyper_parameters<GptOptions>(folder));
// Fields that the checkpoint lacks keep their values in `defaults`. Throws CheckpointError, or UsageError if the
// checkpoint has a field that Options lacks, or a value that the field cannot have.
template <class Options>
Options load_hyper_parameters(const std::filesystem::path& folder, Options defaults = {}) {
  set_fields(defaults, saved_hyper_parameters(folder));
  return defaults;
}

}  // namespace fulgur
