#pragma once

#include <memory>

#include "fulgur/core/loader.h"

namespace fulgur {

// A loader whose every epoch is the first epoch of `loader`, in the same order: for overfit_batches, which trains on
// the same few batches even if the loader shuffles.
std::shared_ptr<Loader> repeat_first_epoch(std::shared_ptr<Loader> loader);

}  // namespace fulgur
