#include "fulgur/launch/open_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>

namespace fulgur {

int64_t allow_open_files(int64_t count) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlim_t wanted = std::min(static_cast<rlim_t>(count), limit.rlim_max);
  const rlim_t before = limit.rlim_cur;
  if (wanted > before) {
    limit.rlim_cur = wanted;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<int64_t>::max()));
}

}  // namespace fulgur
