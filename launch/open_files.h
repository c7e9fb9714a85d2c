#pragma once

#include <cstdint>

namespace fulgur {

// Lets this process have `count` files and connections open, if its hard limit is not below that; otherwise as many as
// it may. Most systems allow 1024 until a process asks for more. Returns the limit from now on.
int64_t allow_open_files(int64_t count);

}  // namespace fulgur
