#include "fulgur/distributed/gloo_adapter.h"

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace fulgur {

// Every two ranks are connected at once: a device that connects them when they first exchange something (lazyInit) does
// so without a lock, and several threads of a rank use a group. ProcessGroupGloo holds Gloo's own objects only by
// pointer, so stand-ins for their classes suffice, as long as no code here creates, calls or destroys such an object.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const GroupConfig& group) {
  using c10d::ProcessGroupGloo;
  auto options = ProcessGroupGloo::Options::create(group.connect_timeout);
  options->devices.push_back(group.network.interface.empty()
                                 ? ProcessGroupGloo::createDeviceForHostname(group.network.address)
                                 : ProcessGroupGloo::createDeviceForInterface(group.network.interface));
  return c10::make_intrusive<ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(group.name, group.store),
                                               static_cast<int>(group.rank), static_cast<int>(group.world_size()),
                                               options);
}

}  // namespace fulgur
