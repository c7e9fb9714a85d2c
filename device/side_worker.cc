#include "device/side_worker.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <utility>

namespace fulgur {

SideWorker::SideWorker(c10::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

std::shared_future<void> SideWorker::run(std::function<void()> job) {
  if (!stream_) return worker_.run(std::move(job));
  const auto asked_before = std::make_shared<c10::Event>(device_.type());
  asked_before->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return worker_.run([this, asked_before, job = std::move(job)] {
    const c10::StreamGuard on_side_stream(*stream_);
    asked_before->block(*stream_);
    job();
    stream_->synchronize();
  });
}

}  // namespace fulgur
