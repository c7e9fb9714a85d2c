#include "fulgur/device/stream_worker.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sched.h>
#include <sys/prctl.h>

#include <chrono>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "fulgur/base/intra_op_threads.h"
#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

void bind_to_core(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<size_t>(core), &cores);
  if (::sched_setaffinity(0, sizeof(cores), &cores) != 0) log_warning("a thread cannot be bound to core {}", core);
}

// Sleeps rather than spins, as synchronize() would, because other threads need the core: to feed the device, or to
// update parameters.
void wait_for(const c10::Stream& stream) {
  while (!stream.query()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// Waits for the job's work on the device before the job's memory may be freed, also when the job throws.
template <class Job>
void run_synchronized(const c10::Stream& stream, const Job& job) {
  try {
    job();
  } catch (...) {
    const std::exception_ptr why = std::current_exception();
    try {
      wait_for(stream);
    } catch (const std::exception& also) {
      log_warning("a device failed after another error: {}", also.what());
    }
    std::rethrow_exception(why);
  }
  wait_for(stream);
}

}  // namespace

StreamWorker::StreamWorker(c10::Device device, const StreamWorkerOptions& options) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  const ScopedIntraOpThreads restored;
  const auto prepare = [device, options] {
    if (!device.is_cpu()) {
      c10::impl::VirtualGuardImpl(device.type())
          .setDevice(device);              // otherwise the first device would get a context from this thread
      ::prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: lets wait_for() sleep no longer than requested
    }
    at::get_num_threads();  // later the first call in a thread would overwrite what is set
    if (options.one_thread) use_one_intra_op_thread();
    if (options.core) bind_to_core(*options.core);
  };
  worker_.run(prepare).get();
}

std::shared_future<void> StreamWorker::run(std::function<void()> job) {
  if (!stream_) return worker_.run(std::move(job));
  auto asked_before = std::make_shared<c10::Event>(device_.type());
  asked_before->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return worker_.run([this, asked_before = std::move(asked_before), job = std::move(job)]() mutable {
    const c10::StreamGuard on_side_stream(*stream_);
    const auto event = std::move(asked_before);  // the event is released here, where the thread has the right device
    run_synchronized(*stream_, [&] {
      event->block(*stream_);
      job();
    });
  });
}

}  // namespace fulgur
