#include "fulgur/programs/program_archive.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <string>

#include "fulgur/base/error.h"
#include "tests/checkpoint/fuzz/require.h"
#include "tests/testing/largest_allocation.h"
#include "tests/testing/temp_dir.h"

namespace {

using namespace fulgur;
using fulgur::testing::require;

// A file in memory that has the bytes.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(::memfd_create("fuzz", 0)) {
    require(descriptor_ >= 0 && ::write(descriptor_, data, size) == static_cast<ssize_t>(size));
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

 private:
  int descriptor_;
};

// Copies every tensor, except those that repeat few bytes many times, into an archive with the same values.
void check_weights(const ProgramArchive& archive, size_t size) {
  std::map<std::string, at::Tensor> values;
  for (const std::string& name : archive.weight_names()) {
    const at::Tensor tensor = archive.weight(name).tensor;
    if (tensor.nbytes() > size) return;
    values[name] = tensor.clone();
  }
  const fulgur::testing::TempDir folder;
  archive.write_with(folder.path() / "again.pt2", values);
  const ProgramArchive again(folder.path() / "again.pt2");
  require(again.weight_names() == archive.weight_names());
}

}  // namespace

// An archive is refused, or its tensors lie within the file and can be written again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryFile file(data, size);
  const fulgur::testing::LargestAllocation allocated;
  try {
    const ProgramArchive archive(file.path());
    require(allocated.num_bytes() <= 100'000 + 50 * size);
    check_weights(archive, size);
  } catch (const CheckpointError&) {
  }
  require(allocated.num_bytes() <= 100'000 + 50 * size);
  return 0;
}
