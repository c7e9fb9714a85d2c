#pragma once

#include <exception>
#include <string>

namespace fulgur {

// What an exception says: without libtorch's stack trace, and with the type of one that is no std::exception.
std::string text_of(const std::exception_ptr& error);

}  // namespace fulgur
