#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_range.h"
#include "core/state.h"

namespace fulgur {

// A checkpoint, as any rank of any run may read it: files are mapped when something of them is asked for, and their
// bytes compared with the manifest then, once. Errors: CheckpointError that names folder, file and reason. Threading:
// one thread at a time.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::filesystem::path folder, VerifyOptions verify = {});

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  const State& run() const { return run_; }
  State rank(int64_t rank) const;  // of one of manifest().world_size ranks; empty if there is none
  bool has_optimizer_state() const { return run_.find<bool>("weights_only") == nullptr; }

  // Without aliases; views where they can be. Finished: as they are updated, of 16 bits the fp32 masters, and with the
  // update that was under way when the checkpoint was taken.
  NamedTensors weights() const;
  NamedTensors finished_weights() const;

  // The optimizer's state of elements of a parameter, put together from the files of several ranks if need be.
  StateTensors read(const std::string& parameter, int64_t begin, int64_t end) const;

 private:
  struct Part {  // of a parameter
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
  std::map<std::string, std::vector<Part>, std::less<>> parts_;  // by parameter, in order
  mutable std::map<std::string, std::unique_ptr<SafetensorsFile>, std::less<>> files_;
  mutable std::map<std::string, StateTensors, std::less<>> range_tensors_;  // by "<parameter>[begin:end]"
};

}  // namespace fulgur
