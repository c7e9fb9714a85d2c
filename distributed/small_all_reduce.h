#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <vector>

#include "distributed/collective.h"

namespace fulgur {

// An all_reduce of few bytes on a CPU, where what takes time is waking threads: every rank sends the whole tensor to
// every other, and adds what comes in the order of ranks, on the thread that waits for it. Nothing runs in between:
// until finish() the tensor is as it was. Must not be destroyed before, unless the connections are broken.
// Ownership: holds the tensor. Threading: one thread at a time; beside others of the same backend, if every rank starts
// them in the same order.
// Errors: what the backend throws (std::exception), after the timeout at the latest.
class SmallAllReduce {
 public:
  static bool is_small(const at::Tensor& flat, int64_t world_size);

  SmallAllReduce(c10d::Backend& backend, at::Tensor flat, ReduceOp op, std::chrono::milliseconds timeout);
  SmallAllReduce(const SmallAllReduce&) = delete;
  SmallAllReduce& operator=(const SmallAllReduce&) = delete;

  void finish();  // throws again what it threw
  bool finished() const { return finished_; }

 private:
  using Transfer = c10::intrusive_ptr<c10d::Work>;

  void add_up();

  const int64_t rank_;
  const at::Tensor flat_;
  const ReduceOp op_;
  const std::chrono::steady_clock::time_point deadline_;
  at::Tensor received_;  // [world_size, flat.numel()]
  std::vector<Transfer> transfers_;
  bool finished_ = false;
  std::exception_ptr error_{};
};

}  // namespace fulgur
