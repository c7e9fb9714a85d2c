#include "core/exception_text.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <cxxabi.h>

#include <typeinfo>

namespace fulgur {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& c10_error) {
    return c10_error.what_without_backtrace();
  } catch (const std::exception& std_error) {
    return std_error.what();
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    return "an exception of type " + (type == nullptr ? "unknown" : c10::demangle(type->name()));
  }
}

}  // namespace fulgur
