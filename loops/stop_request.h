#pragma once

#include <atomic>
#include <string_view>

#include "fulgur/base/logging.h"

namespace fulgur {

// Whether somebody has requested that fit stops. Threading: any thread.
class StopRequest {
 public:
  void request(std::string_view reason) {
    if (!requested_.exchange(true)) log_info("stopping: {}", reason);
  }
  bool is_requested() const { return requested_; }
  void clear() { requested_ = false; }

 private:
  std::atomic<bool> requested_ = false;
};

}  // namespace fulgur
