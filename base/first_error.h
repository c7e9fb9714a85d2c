#pragma once

#include <exception>
#include <string_view>
#include <utility>

#include "fulgur/base/exception_text.h"
#include "fulgur/base/logging.h"

namespace fulgur {

// Makes several calls, each even if an earlier call throws, and keeps the first exception.
class FirstError {
 public:
  template <class Call>
  void run(const Call& call) {
    try {
      call();
    } catch (...) {
      keep(std::current_exception());
    }
  }
  void keep(std::exception_ptr error) {
    if (first_ == nullptr) first_ = std::move(error);
  }

  const std::exception_ptr& get() const { return first_; }  // null: no call has thrown
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
