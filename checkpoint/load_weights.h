#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "core/field_state.h"
#include "core/state.h"

namespace fulgur {

// Copies weights, wherever they were read from, into the parameters and buffers of a module, which may be of another
// precision and on any device:
//   load_weights(*model, read_huggingface("gpt2/", names), "gpt2/");
// With `strict` both must have the same names (of tied ones one name is enough): else CheckpointError that lists what
// is missing and what is unexpected; otherwise that is logged. A shape that differs, or a dtype unless both are
// floating, is an error in either case, before anything is copied. `source` begins the messages.
void load_weights(torch::nn::Module& module, const NamedTensors& weights, std::string_view source, bool strict = true);

// What a checkpoint keeps of Module::save_hyper_parameters, by name; empty if it keeps none. Throws CheckpointError if
// there is no checkpoint.
State saved_hyper_parameters(const std::filesystem::path& folder);

// The options that the module of a checkpoint was made with, so that it can be made again:
//   const auto model = make_module<Gpt>(load_hyper_parameters<GptOptions>(folder));
// Fields that are not there are those of `defaults`. Throws CheckpointError, or UsageError if `folder` has a field that
// Options has not, or a value that it cannot have.
template <class Options>
Options load_hyper_parameters(const std::filesystem::path& folder, Options defaults = {}) {
  set_fields(defaults, saved_hyper_parameters(folder));
  return defaults;
}

}  // namespace fulgur
