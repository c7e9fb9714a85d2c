#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <functional>

#include "fulgur/core/batch.h"
#include "fulgur/core/module.h"

namespace fulgur {

// Writes what `predict` does with the batch as a TorchScript file, which torch.jit.load() in Python and
// nn::ScriptedProgram read: parameters and buffers by name, inputs by the names in the batch, one tensor or a tuple of
// them as the result. The module is traced in eval mode, without gradients, and its mode restored.
//
// A trace records operators, not C++: an `if` or a size that the code reads becomes what it was for this batch. So the
// file is read back and run on the batch, and on the first half of it, and must give what `predict` gives; write
// `x.flatten(1)` or `x.view({-1, 8})` instead of `x.view({x.size(0), 8})`.
// The file also holds the batch and the outputs for it, which //tools:export reads.
// The module must be owned by a shared_ptr, and the batch must have at least 2 samples.
// Errors: SetupError if the results differ, naming the output and by how much; the file is not written then.
void export_torchscript(torch::nn::Module& module, const std::function<Batch(const Batch&)>& predict,
                        const Batch& example, const std::filesystem::path& file);

// The same for what predict_step does.
void export_torchscript(Module& module, const Batch& example, const std::filesystem::path& file);

}  // namespace fulgur
