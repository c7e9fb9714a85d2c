// Stands in for a Gloo header that the torch wheel lacks; see third_party/BUILD.
#pragma once

#include <chrono>

namespace gloo {
namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds);  // never called by us
};

}  // namespace gloo
