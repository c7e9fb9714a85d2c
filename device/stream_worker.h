#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <future>
#include <optional>
#include <vector>

#include "fulgur/base/job_queue.h"

namespace fulgur {

struct StreamWorkerOptions {
  bool one_thread = false;    // one intra-op thread for operations: the others are busy with the step
  std::optional<int> core{};  // binds the thread to this core; nullopt: not bound
};

// A background thread for copies between a device and the host, or for updates. Jobs run one after another. On a GPU
// they run on a separate stream, which first waits for the work that the caller of run() had queued on the device; a
// job is done when the device has completed the job's work, too. On a CPU the order is the same without streams.
// Tensors that a job uses must live until the job is done.
class StreamWorker {
 public:
  explicit StreamWorker(c10::Device device, const StreamWorkerOptions& options = {});

  std::shared_future<void> run(std::function<void()> job);  // get() throws the exception of the job

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  // set on a GPU
  JobQueue worker_;
};

}  // namespace fulgur
