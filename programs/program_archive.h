#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/programs/archive_entries.h"
#include "fulgur/programs/exported_program.h"

namespace fulgur {

// An archive of torch.export.save() (torch 2.11), mapped into memory: a zip file with the graph as JSON and, in an
// entry for each tensor, its bytes. Nothing in it is executed; entries that are pickled are refused.
// The file must not be changed while this object or one of its tensors lives; renaming or deleting it is fine.
// Errors: CheckpointError that names the file and the reason.
class ProgramArchive {
 public:
  // Throws unless the file is such an archive, holds one program, and describes every tensor that it uses.
  explicit ProgramArchive(const std::filesystem::path& file);

  const program::ExportedProgram& program() const { return program_; }

  // Weights, or buffers and constants that are not part of the state dict.
  struct Tensor {
    at::Tensor tensor;  // a view of the file, unless its bytes are not aligned; writing to it never changes the file
    bool requires_grad = false;
    std::string entry;  // tensors of the same entry with the same layout are one tensor: tied weights
  };
  Tensor weight(const std::string& name) const { return tensor(weights_, name); }
  Tensor constant(const std::string& name) const { return tensor(constants_, name); }

  const ArchiveEntries& entries() const { return entries_; }

  std::vector<std::string> weight_names() const;  // parameters and persistent buffers that the graph uses

  // Writes a copy of the archive that has other values: `weights` by the names of weight(), in the shapes and data
  // types of the archive. torch.export.load opens it. One name of each tied weight is enough. Throws if a weight is
  // missing, unknown, or does not fit.
  void write_with(const std::filesystem::path& file, const std::map<std::string, at::Tensor>& weights) const;

 private:
  struct Stored {  // how a tensor lies in its entry
    std::string entry;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
    int64_t storage_offset;  // in elements
    bool requires_grad;
  };
  using Index = std::map<std::string, Stored>;

  std::string_view bytes_of(const std::string& entry) const;
  Index read_index(const std::string& folder, const std::string& kind) const;
  Stored read_stored(const std::string& folder, const std::string& name, const nlohmann::json& json) const;
  void check_inside(const Stored& stored) const;
  void check_all_there() const;
  at::Tensor storage_of(const Stored& stored) const;
  Tensor tensor(const Index& index, const std::string& name) const;
  [[noreturn]] void fail(std::string_view reason) const;

  std::shared_ptr<const MemoryMap> map_;
  ArchiveEntries entries_;
  std::string model_;  // the program's name in the archive
  program::ExportedProgram program_;
  Index weights_, constants_;
};

}  // namespace fulgur
