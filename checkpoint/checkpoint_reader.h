#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/checkpoint/state_range.h"

namespace fulgur {

// A checkpoint, readable by any rank of any run. Each file is mapped and compared with the manifest when its content is
// first requested. Errors: CheckpointError that names folder, file and reason. Threading: one thread at a time.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::filesystem::path folder, VerifyOptions verify = {});

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  const State& run() const { return run_; }
  State rank(int64_t rank) const;  // state of one of the manifest().world_size ranks; empty if none was saved
  bool has_optimizer_state() const { return run_.find<bool>("weights_only") == nullptr; }

  // The weights without aliases; views of the files where possible. finished_weights() are the weights as the optimizer
  // sees them: the fp32 masters of 16-bit parameters, with the delayed update that was in progress when the checkpoint
  // was saved. If the run averaged its weights, both return the average.
  NamedTensors weights() const;
  NamedTensors finished_weights() const;

  // The optimizer state of elements [begin, end) of a parameter, assembled from the files of several ranks if need be.
  StateTensors read(const std::string& parameter, int64_t begin, int64_t end) const;

 private:
  struct Part {  // a range of a parameter's elements and the file that has its state
    int64_t begin, end;
    std::string file;
  };
  const SafetensorsFile& file(const std::string& name) const;
  std::vector<int64_t> strides_of(const std::string& parameter, const at::Tensor& weight) const;
  StateTensors tensors_of(const std::string& parameter, const Part& part) const;
  void check(const std::string& name) const;

  std::filesystem::path folder_;
  VerifyOptions verify_;
  Manifest manifest_;
  State run_;
  std::map<std::string, std::vector<Part>, std::less<>> parts_;  // by parameter, sorted by begin
  mutable std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> files_;
  mutable std::map<std::string, StateTensors, std::less<>> range_tensors_;  // by "<parameter>[begin:end]"
};

}  // namespace fulgur
