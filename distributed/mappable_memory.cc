#include "fulgur/distributed/mappable_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "fulgur/base/huge_pages.h"

namespace fulgur {
namespace {

std::atomic<int64_t> num_made = 0, num_freed = 0;

// What the storage of a mappable tensor keeps.
struct Region {
  const int descriptor;
  const int64_t number;
  const size_t num_bytes;
  void* memory = MAP_FAILED;

  ~Region() {
    if (memory != MAP_FAILED) ::munmap(memory, num_bytes);
    ::close(descriptor);
  }
};

void free_region(void* region) {
  delete static_cast<Region*>(region);
  ++num_freed;
}

void* map(int descriptor, size_t num_bytes) {
  void* const memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory != MAP_FAILED) ask_for_huge_pages(memory, num_bytes);
  return memory;
}

}  // namespace

at::Tensor make_mappable(int64_t num_elements, c10::ScalarType dtype) {
  const auto num_bytes = static_cast<size_t>(num_elements) * c10::elementSize(dtype);
  const bool are_too_many = num_made - num_freed >= kMostMappable;
  const int descriptor = num_bytes == 0 || are_too_many ? -1 : ::memfd_create("fulgur", MFD_CLOEXEC);
  if (descriptor < 0) return at::zeros({num_elements}, dtype);
  auto* const region = new Region{.descriptor = descriptor, .number = ++num_made, .num_bytes = num_bytes};
  const bool has_memory = ::ftruncate(descriptor, static_cast<off_t>(num_bytes)) == 0;
  if (has_memory) region->memory = map(descriptor, num_bytes);
  if (region->memory == MAP_FAILED) {
    free_region(region);
    return at::zeros({num_elements}, dtype);
  }
  return at::for_blob(region->memory, {num_elements}).context(region, free_region).options(dtype).make_tensor();
}

MappablePlace place_of(const at::Tensor& flat) {
  const c10::DataPtr& memory = flat.storage().data_ptr();
  if (memory.get_deleter() != free_region) return {};
  const auto& region = *static_cast<const Region*>(memory.get_context());
  return {.process = ::getpid(),
          .descriptor = region.descriptor,
          .number = region.number,
          .num_bytes = static_cast<int64_t>(region.num_bytes),
          .offset = flat.storage_offset() * flat.element_size(),
          .num_freed = num_freed};
}

MappedMemory::~MappedMemory() {
  for (OfRank& of_rank : ranks_) unmap(of_rank);
}

void MappedMemory::unmap(OfRank& of_rank) {
  for (const auto& [number, mapping] : of_rank.mappings) {
    if (mapping.memory != nullptr) ::munmap(mapping.memory, mapping.num_bytes);
  }
  of_rank.mappings.clear();
}

bool MappedMemory::knows(int64_t rank, const MappablePlace& place) const {
  const OfRank& of_rank = ranks_[static_cast<size_t>(rank)];
  return of_rank.num_freed == place.num_freed && of_rank.mappings.contains(place.number);
}

std::byte* MappedMemory::find(int64_t rank, const MappablePlace& place) {
  OfRank& of_rank = ranks_[static_cast<size_t>(rank)];
  if (of_rank.num_freed != place.num_freed) unmap(of_rank);
  of_rank.num_freed = place.num_freed;
  const auto [found, is_new] = of_rank.mappings.try_emplace(place.number);
  Mapping& mapping = found->second;
  if (is_new) {
    mapping = {.memory = nullptr, .num_bytes = static_cast<size_t>(place.num_bytes)};
    const int descriptor =
        ::open(fmt::format("/proc/{}/fd/{}", place.process, place.descriptor).c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor >= 0) {
      void* const memory = map(descriptor, mapping.num_bytes);
      if (memory != MAP_FAILED) mapping.memory = memory;
      ::close(descriptor);
    }
  }
  return mapping.memory == nullptr ? nullptr : static_cast<std::byte*>(mapping.memory) + place.offset;
}

}  // namespace fulgur
