#include "fulgur/device/cuda_graph.h"

#include <c10/util/Exception.h>

#ifdef FULGUR_HAS_CUDA
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "fulgur/base/cuda_function.h"
#endif

namespace fulgur {

#ifdef FULGUR_HAS_CUDA

class CudaGraph::Recording : public at::cuda::CUDAGraph {
 public:
  explicit Recording(const std::function<void()>& body) {
    // Memory that is cached for use without a graph cannot be taken for one, nor freed while the recording goes on.
    c10::cuda::CUDACachingAllocator::emptyCache();
    // Other threads may meanwhile do what this one may not: those of a loader allocate pinned memory, for example.
    capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      body();
    } catch (...) {
      abandon();
      throw;
    }
    try {
      capture_end();
    } catch (...) {
      abandon();
      throw;
    }
  }

 private:
  // Ends a recording that failed. CUDAGraph::capture_end() stops at the first error, and leaves allocators and random
  // numbers as they are during a recording.
  void abandon() noexcept {
    const auto ignoring_errors = [](const auto& call) {
      try {
        call();
      } catch (const std::exception&) {
      }
    };
    bool ended = false;
    ignoring_errors([&] {
      if (!capture_ended_) capture_end();
      ended = true;
    });
    if (!ended) {
      ignoring_errors([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_); });
      ignoring_errors([&] { at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(mempool_id_); });
      for (const auto& [state, increment] : captured_generator_states_) state->capturing_ = false;
      capture_ended_ = true;  // so that the destructor gives the memory back
    }
    cuda_function<decltype(::cudaGetLastError)>("cudaGetLastError")();  // or a later call reports it
  }
};

CudaGraph::CudaGraph(c10::Device device, const std::function<void()>& body) {
  TORCH_CHECK(device.is_cuda(), "a CUDA graph is for a GPU, not for ", device);
  recording_ = std::make_unique<Recording>(body);
}

CudaGraph::~CudaGraph() = default;

void CudaGraph::replay() { recording_->replay(); }

#else

class CudaGraph::Recording {};

CudaGraph::CudaGraph(c10::Device device, const std::function<void()>& /*body*/) {
  TORCH_CHECK(false, "this fulgur was built without CUDA, so that ", device, " has no graphs");
}

CudaGraph::~CudaGraph() = default;

void CudaGraph::replay() {}

#endif

}  // namespace fulgur
