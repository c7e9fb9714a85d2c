#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>

#include "distributed/collective.h"

namespace fulgur {

struct TransferOptions {
  std::chrono::milliseconds timeout{};  // of a whole collective
  int64_t staging_bytes = 8 << 20;      // memory of reduce_scatter for what arrives: two chunks per peer
};

// Messages between two ranks that have the same tag arrive in the order they are sent.
inline constexpr int kDataTag = 0, kAbortTag = 1, kBarrierTag = 2, kSmallAllReduceTag = 3, kNumTags = 4;

// total = total (op) value
void combine(const at::Tensor& total, const at::Tensor& value, ReduceOp op);

// Throws what the backend does, or std::runtime_error after an abort.
void wait_until(const c10::intrusive_ptr<c10d::Work>& transfer, std::chrono::steady_clock::time_point deadline);

// reduce_scatter and all_gather from sends and receives between every two ranks, in place, for a backend (Gloo) whose
// own send twice the bytes and clone the tensor. Each rank sends and receives (world_size - 1) / world_size of the
// tensor, which is the least there is.
// A reduction adds in the order of ranks, ((x0 + x1) + x2) + ..., so its bits depend on neither timing nor where the
// tensor begins. Calls block; one thread at a time, and every rank makes the same calls in the same order.
// Errors: what the backend throws (std::exception), after the timeout at the latest.
class Transfers {
 public:
  Transfers(c10::intrusive_ptr<c10d::Backend> backend, TransferOptions options);

  void reduce_scatter(const at::Tensor& flat, ReduceOp op);
  void all_gather(const at::Tensor& flat);

  // With messages that are nobody else's: where another rank makes another call, both wait, until the timeout. (In
  // Gloo, messages of one collective that arrive in another of another size end the process.)
  void barrier();

  // Breaks the backend's connections: what runs on it throws, here and on every other rank. From any thread.
  void abort();

 private:
  using Clock = std::chrono::steady_clock;
  using Transfer = c10::intrusive_ptr<c10d::Work>;

  Transfer send(at::Tensor slice, int64_t peer, int tag = kDataTag);
  Transfer receive(at::Tensor slice, int64_t peer, int tag = kDataTag);
  at::Tensor staging(const at::Tensor& like, int64_t num_elements);
  std::vector<Transfer> send_to_owners(const at::Tensor& flat, int64_t chunk_size);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const TransferOptions options_;
  const int64_t rank_;
  const int64_t world_size_;
  at::Tensor staging_;  // bytes
};

}  // namespace fulgur
