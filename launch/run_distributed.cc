#include "fulgur/launch/run_distributed.h"

#include <exception>

namespace fulgur {

void run_distributed(const SessionOptions& options, const std::function<void(World&)>& body) {
  Session session(options);
  try {
    body(session.world());
  } catch (...) {
    session.fail(std::current_exception());
  }
  session.finish();
}

}  // namespace fulgur
