#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/group.h"
#include "fulgur/distributed/host_transport.h"
#include "fulgur/distributed/small_queue.h"

namespace fulgur {

// Connects the ranks of a group by Gloo, over the group's network; null if their tensors are not on the CPU. Every rank
// of the group calls it. Throws what c10d throws (std::exception).
std::unique_ptr<HostTransport> connect_gloo(const GroupConfig& group);

// Moves tensors over connections of Gloo. all_reduce, except of 16-bit sums, and broadcast are Gloo's; reduce_scatter
// and all_gather are sends and receives between every two ranks, in place, because Gloo's own send twice the bytes and
// clone the tensor. Each rank sends and receives (world_size - 1) / world_size of the tensor, which is the minimum.
// Every call after an error throws that error.
class GlooTransport final : public HostTransport {
 public:
  // `timeout` is the limit for a whole collective. reduce_scatter receives two chunks from each peer at a time, into
  // TransportOptions::staging_bytes of memory.
  GlooTransport(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout,
                const TransportOptions& options = {});

  void all_reduce(const at::Tensor& flat, ReduceOp op) override;
  bool all_reduces_in_rank_order() const override { return rank_order_all_reduce_; }
  void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges) override;
  void all_gather(const at::Tensor& flat, const RankRanges& ranges) override;
  void broadcast(const at::Tensor& flat, int64_t root) override;

  // Uses a message tag of its own: if another rank makes another call, both wait until the timeout. (In Gloo, a message
  // of one collective that arrives in another of another size ends the process.)
  void barrier() override;

  // Sends the whole tensor to every other rank; with more than 8 ranks, they pass it on to one another.
  std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) override;

  void abort() override;

 private:
  using Clock = std::chrono::steady_clock;
  using Transfer = c10::intrusive_ptr<c10d::Work>;
  class Small;

  Transfer send(at::Tensor slice, int64_t peer, int tag);
  Transfer receive(at::Tensor slice, int64_t peer, int tag);
  at::Tensor staging(const at::Tensor& like, int64_t num_elements);
  template <class Body>
  void run(const Body& body);
  void rethrow_error() const;
  void keep_error(const std::exception_ptr& error);
  void scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges);
  void gather(const at::Tensor& flat, const RankRanges& ranges);
  void meet();
  void reduce_in_few_messages(const at::Tensor& flat, ReduceOp op, Clock::time_point deadline);
  std::vector<Transfer> send_to_owners(const at::Tensor& flat, const RankRanges& ranges, int64_t chunk_size);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::chrono::milliseconds timeout_;
  const bool rank_order_all_reduce_;
  const int64_t staging_bytes_;
  const int64_t rank_;
  const int64_t world_size_;
  at::Tensor staging_;                         // bytes
  std::vector<std::shared_ptr<Small>> small_;  // all that may be unfinished
  SmallQueue small_of_many_;
  mutable std::mutex error_mutex_;  // several threads may call
  std::exception_ptr error_{};      // the first error; null if none
};

}  // namespace fulgur
