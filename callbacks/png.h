#pragma once

#include <string>

#include "fulgur/core/record.h"

namespace fulgur {

// The image as a PNG file (ISO/IEC 15948), not compressed.
std::string to_png(const Image& image);

}  // namespace fulgur
