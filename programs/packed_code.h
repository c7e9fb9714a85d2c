#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "fulgur/programs/archive_entries.h"

namespace fulgur {

class LoadedCode;

// Why kernels that Inductor has compiled for one compute capability do not run on a GPU of another; both are 90
// for 9.0, or 0 if not known. Until 8.9 they run on those with the same major number and no lower minor one; from 9.0
// on Triton compiles for one capability alone. Empty if they run.
std::string why_not_on_capability(int compiled_for, int own);

// Native code that AOTInductor (torch 2.11) has put into an archive, under the name "model" by default.
class PackedCode {
 public:
  // `entries` of `archive` must outlive the object. Throws CheckpointError if there is no such code, or no record of
  // what it was compiled for.
  PackedCode(std::filesystem::path archive, const ArchiveEntries& entries, const std::string& model);

  // Why the code does not run on `device` of this machine: compiled code is not allowed (see allow_compiled_code()), or
  // this was compiled for another device, kind of machine, GPUs of another compute capability, or for instructions that
  // the processor does not have. Empty if it runs. A sentence without its subject: "was compiled for cuda, but is to
  // run on cpu".
  std::string why_not_on(c10::Device device) const;

  // Loads code that runs on `device`, called by one thread at a time, or by any number of threads. Throws
  // CheckpointError if it cannot be loaded.
  std::unique_ptr<LoadedCode> load_for_one_thread(c10::Device device) const;
  std::unique_ptr<LoadedCode> load_for_any_thread(c10::Device device) const;

 private:
  std::unique_ptr<LoadedCode> load(c10::Device device, size_t num_models) const;

  const std::filesystem::path archive_;
  std::map<std::string, std::string_view> files_;
  std::string library_;                          // the file that is loaded
  std::map<std::string, std::string> metadata_;  // what it was compiled for, by Inductor's names
};

}  // namespace fulgur
