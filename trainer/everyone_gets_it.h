#pragma once

#include <exception>
#include <string_view>

#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"

namespace fulgur {

// Makes calls of which each must be made even if another throws. Keeps the first exception.
class EveryoneGetsIt {
 public:
  template <class Call>
  void operator()(const Call& call) {
    try {
      call();
    } catch (...) {
      if (first_ == nullptr) first_ = std::current_exception();
    }
  }
  const std::exception_ptr& first() const { return first_; }
  void rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }
  void warn(std::string_view what) const {
    if (first_ != nullptr) log_warning("{}: {}", what, text_of(first_));
  }

 private:
  std::exception_ptr first_;
};

}  // namespace fulgur
