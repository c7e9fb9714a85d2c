#include "fulgur/device/host_arena.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/cuda_function.h"
#include "fulgur/base/error.h"
#include "fulgur/base/huge_pages.h"
#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

constexpr int64_t kAlignment = 64;

double gib(int64_t num_bytes) { return static_cast<double>(num_bytes) / (1 << 30); }

std::optional<int64_t> read_number(const char* file) {
  int64_t number = 0;
  return std::ifstream(file) >> number ? std::optional(number) : std::nullopt;  // "max" is no number
}

// The number after a name at the beginning of a line.
std::optional<int64_t> read_field(const char* file, std::string_view name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name)) return std::stoll(line.substr(name.size()));
  }
  return std::nullopt;
}

int64_t available_in_machine() {
  const auto kib = read_field("/proc/meminfo", "MemAvailable:");
  return kib ? *kib * 1024 : std::numeric_limits<int64_t>::max();
}

int64_t available_in_container() {
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::numeric_limits<int64_t>::max();
  return *limit - *used + read_field("/sys/fs/cgroup/memory.stat", "inactive_file ").value_or(0);  // reclaimable
}

// The user's figure, for a machine whose memory grows as it is used, so that the system reports less.
std::optional<int64_t> available_as_told() {
  const char* const text = std::getenv("FULGUR_HOST_MEMORY_GIB");
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const double told = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(told > 0.0 && told < 1e9)) {
    throw UsageError(fmt::format(
        "FULGUR_HOST_MEMORY_GIB is '{}'; set it to the GiB of this machine's memory that may be used, such as 96, or "
        "leave it unset",
        text));
  }
  return static_cast<int64_t>(told * (1 << 30));
}

// Touches all pages on several threads: pinning untouched pages would make the system create them on one thread.
void touch(std::byte* address, size_t num_bytes, int64_t num_threads) {
  constexpr size_t kPageBytes = 4096;
  const size_t num_pages = (num_bytes + kPageBytes - 1) / kPageBytes;
  std::vector<std::jthread> threads;
  for (int64_t t = 0; t < num_threads; ++t) {
    const size_t begin = num_pages * static_cast<size_t>(t) / static_cast<size_t>(num_threads);
    const size_t end = num_pages * static_cast<size_t>(t + 1) / static_cast<size_t>(num_threads);
    threads.emplace_back([=] {
      for (size_t page = begin; page < end; ++page) {
        *static_cast<volatile std::byte*>(address + page * kPageBytes) = std::byte{0};
      }
    });
  }
}

using HostRegister = int(void*, size_t, unsigned);
using HostUnregister = int(void*);
using LastError = int();

bool pin(void* address, size_t num_bytes) {
  auto* const host_register = cuda_function<HostRegister>("cudaHostRegister");
  if (host_register != nullptr && host_register(address, num_bytes, /*flags=*/0) == 0) return true;
  if (auto* const forget_error = cuda_function<LastError>("cudaGetLastError")) forget_error();
  static std::atomic<bool> told{false};
  if (!told.exchange(true)) {
    log_warning("the system does not let {:.2f} GiB of memory be pinned (ulimit -l?): copies to the GPU are slower",
                gib(static_cast<int64_t>(num_bytes)));
  }
  return false;
}

}  // namespace

struct HostArena::Memory {
  std::byte* address = nullptr;
  size_t num_bytes = 0;
  bool pinned = false;

  explicit Memory(size_t size) : num_bytes(size) {
    if (size == 0) return;
    void* const mapped =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      throw UsageError(fmt::format("{:.2f} GiB of host memory are refused: {}", gib(static_cast<int64_t>(size)),
                                   std::strerror(errno)));
    }
    address = static_cast<std::byte*>(mapped);
    ask_for_huge_pages(mapped, size);
  }
  ~Memory() {
    if (pinned) cuda_function<HostUnregister>("cudaHostUnregister")(address);
    if (address != nullptr) ::munmap(address, num_bytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

HostArena::HostArena(int64_t num_bytes, const HostArenaOptions& options) {
  const int64_t available = available_bytes() / options.processes;
  if (num_bytes > available) {
    throw UsageError(
        fmt::format("the optimizer's state needs {:.2f} GiB of host memory, but {:.2f} GiB are available; "
                    "use more devices, a smaller model or a smaller ratio; where the system has more than it tells "
                    "of, set FULGUR_HOST_MEMORY_GIB to the memory of this machine that may be used",
                    gib(num_bytes), gib(available)));
  }
  memory_ = std::make_shared<Memory>(static_cast<size_t>(num_bytes));
  if (!options.pinned || num_bytes == 0) return;
  const auto num_cores = static_cast<int64_t>(cores_of_process().size());
  touch(memory_->address, memory_->num_bytes, std::max<int64_t>(1, num_cores / options.processes));
  memory_->pinned = pin(memory_->address, memory_->num_bytes);
}

at::Tensor HostArena::take(int64_t num_elements, c10::ScalarType dtype) {
  const int64_t num_bytes = bytes_for(num_elements, dtype);
  TORCH_CHECK(used_ + num_bytes <= static_cast<int64_t>(memory_->num_bytes), "the arena of ", memory_->num_bytes,
              " bytes is used up");
  std::byte* const address = memory_->address + used_;
  used_ += num_bytes;
  return at::from_blob(address, {num_elements}, [keep = memory_](void*) {}, at::TensorOptions(dtype));
}

int64_t HostArena::num_bytes() const { return static_cast<int64_t>(memory_->num_bytes); }

int64_t HostArena::bytes_for(int64_t num_elements, c10::ScalarType dtype) {
  const auto num_bytes = num_elements * static_cast<int64_t>(c10::elementSize(dtype));
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t HostArena::available_bytes() {
  const auto told = available_as_told();
  return told ? *told : std::min(available_in_machine(), available_in_container());
}

}  // namespace fulgur
