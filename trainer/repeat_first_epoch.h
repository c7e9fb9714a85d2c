#pragma once

#include <memory>

#include "core/loader.h"

namespace fulgur {

// A loader whose every epoch is the first one of `loader`, in that order: for overfit_batches, where the same few
// batches are to be learned by heart even if the loader shuffles.
std::shared_ptr<Loader> repeat_first_epoch(std::shared_ptr<Loader> loader);

}  // namespace fulgur
