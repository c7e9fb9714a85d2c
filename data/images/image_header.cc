#include "fulgur/data/images/image_header.h"

#include <fmt/format.h>

#include <stdexcept>

namespace fulgur {

void throw_image_error(const std::string& name, const std::string& reason) {
  throw std::runtime_error(fmt::format("cannot read the picture '{}': {}", name, reason));
}

}  // namespace fulgur
