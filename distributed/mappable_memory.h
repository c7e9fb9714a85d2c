#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace fulgur {

// Tensors in memory that other processes of this host can map, so that ranks read and write each other's tensors
// without a copy in between. The memory has no name in the file system: a process that knows where a tensor lies opens
// it as a file of its owner, and it is freed with the last process that maps it.

// Zeros. Returns ordinary memory if this process has kMostMappable such tensors, or if the system gives none.
at::Tensor make_mappable(int64_t num_elements, c10::ScalarType dtype);
inline constexpr int64_t kMostMappable = 256;  // each takes a file descriptor

// Where a tensor begins, for other processes. It is sent between ranks as bytes.
struct MappablePlace {
  int32_t process = 0;
  int32_t descriptor = -1;  // -1: the tensor is not in such memory
  int64_t number = 0;       // unique among the allocations of the process
  int64_t num_bytes = 0;    // size of the whole allocation
  int64_t offset = 0;       // in bytes, from its beginning
  int64_t num_freed = 0;    // number of the process's allocations that were freed

  bool is_mappable() const { return descriptor >= 0; }
};
MappablePlace place_of(const at::Tensor& flat);

// The memory of other ranks that this rank has mapped. The mappings of a rank's memory last until a later place shows
// that the rank has freed some of it. Threading: one thread at a time.
class MappedMemory {
 public:
  explicit MappedMemory(int64_t world_size) : ranks_(static_cast<size_t>(world_size)) {}
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  // Whether find() has been called for the memory of this place. Ranks that make the same calls, even for their own
  // memory, get the same answer.
  bool knows(int64_t rank, const MappablePlace& place) const;

  // The place in this process; null if it cannot be mapped, and then for later calls as well.
  std::byte* find(int64_t rank, const MappablePlace& place);

 private:
  struct Mapping {
    void* memory;  // null: it could not be mapped
    size_t num_bytes;
  };
  struct OfRank {
    int64_t num_freed = 0;
    std::map<int64_t, Mapping> mappings{};  // by number
  };
  static void unmap(OfRank& of_rank);

  std::vector<OfRank> ranks_;
};

}  // namespace fulgur
