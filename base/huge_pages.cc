#include "fulgur/base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace fulgur {
namespace {

constexpr size_t kLeastBytes = 4 << 20;  // two huge pages: one of them at least fits, wherever the memory begins

}  // namespace

at::Tensor in_huge_pages(at::Tensor untouched) {
  if (!untouched.is_cpu() || untouched.nbytes() < kLeastBytes) return untouched;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(untouched.const_data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + untouched.nbytes()) / page * page;
  static_cast<void>(::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));  // it is only a wish
  return untouched;
}

}  // namespace fulgur
