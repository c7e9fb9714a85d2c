#include "core/seed.h"

#include <ATen/Context.h>

namespace fulgur {

void seed_everything(uint64_t seed) { at::manual_seed(seed); }

}  // namespace fulgur
