#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <string>

namespace fulgur {

// Why the code that AOTInductor has put into the archive as `model` does not run on `device` of this machine: it was
// compiled for another device, kind of machine, or for instructions that the processor does not have. Empty if it runs.
// Throws CheckpointError if the archive does not say what it was compiled for.
std::string why_code_does_not_run(const std::filesystem::path& file, const std::string& model, c10::Device device);

}  // namespace fulgur
