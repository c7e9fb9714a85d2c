#include "fulgur/checkpoint/memory_map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cerrno>
#include <cstring>

#include "fulgur/checkpoint/file_system.h"

namespace fulgur {

std::shared_ptr<const MemoryMap> MemoryMap::open(const std::filesystem::path& path) {
  return std::shared_ptr<const MemoryMap>(new MemoryMap(path));
}

MemoryMap::MemoryMap(const std::filesystem::path& path) : path_(path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) throw_system_error("open", path, errno);
  const int error = map(descriptor);
  ::close(descriptor);
  if (error != 0) throw_system_error("map", path, error);
}

MemoryMap::~MemoryMap() {
  if (num_bytes_ > 0) ::munmap(data_, num_bytes_);
}

int MemoryMap::map(int descriptor) {
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (status.st_size == 0) return 0;  // nothing to map
  // Private and writable: writing to a tensor in place copies the page, instead of ending the process by SIGSEGV.
  void* data = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                      descriptor, 0);
  if (data == MAP_FAILED) return errno;
  data_ = static_cast<char*>(data);
  num_bytes_ = static_cast<size_t>(status.st_size);
  return 0;
}

at::Tensor MemoryMap::tensor(int64_t begin, at::IntArrayRef sizes, at::ScalarType dtype) const {
  char* const data = data_ + begin;
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(dtype) == 0) {
    return at::from_blob(data, sizes, [map = shared_from_this()](void*) {}, dtype);
  }
  at::Tensor copy = at::empty(sizes, dtype);
  std::memcpy(copy.mutable_data_ptr(), data, copy.nbytes());
  return copy;
}

}  // namespace fulgur
