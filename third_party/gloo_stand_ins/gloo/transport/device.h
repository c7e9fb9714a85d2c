// Stands in for a Gloo header that the torch wheel lacks; see third_party/BUILD.
#pragma once

namespace gloo::transport {
class Device;
class UnboundBuffer;
}  // namespace gloo::transport
