#include "fulgur/base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace fulgur {
namespace {

constexpr size_t kLeastBytes = 4 << 20;  // two huge pages: one of them at least fits, wherever the memory begins

}  // namespace

void ask_for_huge_pages(const void* untouched, size_t num_bytes) {
  if (num_bytes < kLeastBytes) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(untouched);
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + num_bytes) / page * page;
  static_cast<void>(::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));  // it is only a wish
}

at::Tensor in_huge_pages(at::Tensor untouched) {
  if (untouched.is_cpu()) ask_for_huge_pages(untouched.const_data_ptr(), untouched.nbytes());
  return untouched;
}

}  // namespace fulgur
