#include "fulgur/device/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>
#include <utility>

namespace fulgur {

CopyStream::CopyStream(c10::Device device)
    : device_(device), stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

std::vector<at::Tensor> CopyStream::run(const std::function<std::vector<at::Tensor>()>& copy) {
  const c10::impl::VirtualGuardImpl device(device_.type());
  const c10::Stream of_caller = device.getStream(device_);
  while (last_call_ && !last_call_->query()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  last_call_.emplace(device_.type());
  last_call_->record(of_caller);
  std::vector<at::Tensor> copies;
  {
    const c10::StreamGuard on_copies(stream_);
    copies = copy();
  }
  c10::Event copied(device_.type());
  copied.record(stream_);
  copied.block(of_caller);
  // The memory may be reused only after the caller's stream has completed the work that is queued by then.
  for (const at::Tensor& tensor : copies) device.recordDataPtrOnStream(tensor.storage().data_ptr(), of_caller);
  return copies;
}

}  // namespace fulgur
