#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

namespace fulgur {

// Copies the data of a step to a GPU on a separate stream, while the GPU still runs the step before. The host is then
// one step ahead of the GPU: it queues copy and step k while the GPU runs step k - 1.
//   copies.run([&] { return pinned.to(gpu, /*non_blocking=*/true); });   // once before each step
// What is queued on the caller's stream afterwards waits for the copy. Threading: one thread at a time.
class CopyStream {
 public:
  explicit CopyStream(c10::Device device);  // a GPU

  // Calls `copy`, which returns the tensors that it has made. First waits, without spinning, until the GPU has
  // completed the work that was queued before the last call: without this bound the host would fill the memory with
  // copies.
  std::vector<at::Tensor> run(const std::function<std::vector<at::Tensor>()>& copy);

 private:
  c10::Device device_;
  c10::Stream stream_;
  std::optional<c10::Event> last_call_;  // what was queued before the last call
};

}  // namespace fulgur
