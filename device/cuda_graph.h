#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace fulgur {

// Work of a GPU that was recorded once and can be launched again as a whole, which takes the host a few microseconds
// instead of some for each kernel: https://docs.nvidia.com/cuda/cuda-programming-guide, CUDA graphs. The work reads and
// writes the memory that it did when it was recorded; random numbers go on from launch to launch.
class CudaGraph {
 public:
  // Records what `body` launches on the current stream, which must not be the device's default stream, instead of
  // running it. Memory that is allocated meanwhile belongs to the graph. Throws what `body` throws, and c10::Error for
  // what a graph cannot have, such as waiting for the device; the device is as before then.
  CudaGraph(c10::Device device, const std::function<void()>& body);
  ~CudaGraph();

  void replay();  // on the current stream, without waiting for it

 private:
  class Recording;
  std::unique_ptr<Recording> recording_;
};

}  // namespace fulgur
