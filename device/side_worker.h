#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <future>
#include <optional>
#include <vector>

#include "core/serial_worker.h"

namespace fulgur {

struct SideWorkerOptions {
  bool one_thread = false;    // its operations have one intra-op thread: the others are busy with the step
  std::optional<int> core{};  // it is bound to that one
};

// A thread beside the training thread: for copies between a device and the host, or updates. Jobs run one after
// another. On a GPU they run on a stream of their own, which waits for all that the thread that called run() had asked
// of the device until then; a job is done when the device has done its part, too. On a CPU the order is the same
// without streams. Tensors that a job uses must live until it is done.
class SideWorker {
 public:
  explicit SideWorker(c10::Device device, const SideWorkerOptions& options = {});

  std::shared_future<void> run(std::function<void()> job);  // throws from get() what the job throws

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  // of a GPU
  SerialWorker worker_;
};

// The cores that this process may run on (taskset, cgroups).
std::vector<int> cores_of_process();

}  // namespace fulgur
