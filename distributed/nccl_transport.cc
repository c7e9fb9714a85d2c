#include "fulgur/distributed/nccl_transport.h"

#include <chrono>
#include <cstdlib>

#ifdef FULGUR_HAS_CUDA
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#else
#include "fulgur/base/error.h"
#endif

namespace fulgur {

#ifdef FULGUR_HAS_CUDA

namespace {

// NCCL's watchdog fails a collective that is late: the margin lets the control group report the cause first.
constexpr std::chrono::seconds kWatchdogMargin{30};

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_nccl(const GroupConfig& group) {
  if (!group.device.is_cuda()) return nullptr;
  if (!group.network.interface.empty()) {  // "=": exact, not a prefix
    ::setenv("NCCL_SOCKET_IFNAME", ("=" + group.network.interface).c_str(), /*overwrite=*/0);
  }
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = group.timeout + kWatchdogMargin;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>(group.name, group.store), static_cast<int>(group.rank),
      static_cast<int>(group.world_size()), options);
  backend->setBoundDeviceId(group.device);
  return backend;
}

std::string nccl_version() { return c10d::getNcclVersion(); }

#else

c10::intrusive_ptr<c10d::Backend> connect_nccl(const GroupConfig& group) {
  if (!group.device.is_cuda()) return nullptr;
  throw UsageError("NCCL was asked for, but fulgur was built with FULGUR_CUDA=0; build it without, or use the CPU");
}

std::string nccl_version() { return ""; }

#endif

}  // namespace fulgur
