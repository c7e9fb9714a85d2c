#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fulgur/base/job_queue.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/distributed/group.h"
#include "fulgur/distributed/host_transport.h"
#include "fulgur/distributed/mappable_memory.h"
#include "fulgur/distributed/shared_memory.h"

namespace fulgur {

// Connects the ranks of a group by memory that they share. Returns null, on every rank, if their tensors are not on the
// CPU, if they are on several hosts, if one may not see another's memory (rank 0 then logs a warning), or if the
// TransportOptions of one rank turn it off. Where these ask for shared memory, what keeps ranks from it is a
// UsageError. Every rank of the group calls it. It throws what the store throws if a rank does not join in time.
std::unique_ptr<HostTransport> connect_shared_memory(const GroupConfig& group);

// Moves tensors between ranks of one host, through shared memory: each rank copies what the others need into its outbox
// and adds, or copies, from the outboxes of the others. Large tensors that lie, on every rank, in memory from
// allocate() are read and written where they are: an all_reduce is one pass over the memory of all then. All reductions
// add in the order of ranks.
class SharedMemoryTransport final : public HostTransport {
 public:
  // `num_threads`: see TransportOptions.
  SharedMemoryTransport(std::shared_ptr<SharedMemory> shared, std::chrono::milliseconds timeout, int64_t num_threads);

  void all_reduce(const at::Tensor& flat, ReduceOp op) override;
  bool all_reduces_in_rank_order() const override { return true; }
  void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges) override;
  void all_gather(const at::Tensor& flat, const RankRanges& ranges) override;
  void broadcast(const at::Tensor& flat, int64_t root) override;
  void barrier() override;
  std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) override;
  void abort() override;
  at::Tensor allocate(int64_t num_elements, c10::ScalarType dtype) override;

 private:
  using Clock = SharedMemory::Clock;
  using Channel = SharedMemory::Channel;
  struct Exchange;
  class Small;

  Exchange exchange(const char* name, const at::Tensor& flat) const;
  Exchange exchange(const char* name, const at::Tensor& flat, const RankRanges& ranges) const;
  void scatter_chunk(const Exchange& exchange, ReduceOp op, const at::Tensor& into, int64_t begin, int64_t size);
  void gather_chunk(const Exchange& exchange, int64_t begin, int64_t size);
  template <class Value>
  std::vector<Value> tell_all(const Exchange& exchange, const Value& mine);
  std::vector<std::byte*> tensors_in_place(const Exchange& exchange);
  void finish_in_place(const Exchange& exchange);
  template <class Move>
  void in_pieces(const ElementRange& range, int64_t element_size, const Move& move);
  void reduce_in_place(const Exchange& exchange, const std::vector<std::byte*>& tensors, ReduceOp op,
                       const at::Tensor& into, bool is_for_all);
  void gather_in_place(const Exchange& exchange, const std::vector<std::byte*>& tensors);
  int64_t scatter_size(const at::Tensor& flat) const;
  int64_t gather_size(const at::Tensor& flat) const;
  std::shared_ptr<SmallAllReduce> start_small(const char* name, const at::Tensor& flat, ReduceOp op);
  void finish_small(const Small& wanted);
  void send_small_ones();
  template <class Body>
  void run(const Body& body);

  const std::shared_ptr<SharedMemory> shared_;
  const std::chrono::milliseconds timeout_;
  const int64_t num_threads_;
  const int64_t rank_;
  const int64_t world_size_;
  Channel& large_;
  Channel& small_;
  std::exception_ptr large_error_{};
  MappedMemory mapped_;
  bool works_in_place_ = true;  // false once a rank could not map the memory of another
  std::mutex small_mutex_;      // never held while waiting for another rank
  std::condition_variable small_changed_;
  std::deque<std::shared_ptr<Small>> small_started_;  // unfinished ones, oldest first; the sent ones come first
  bool small_is_worked_on_ = false;                   // a thread works on the oldest
  std::exception_ptr small_error_{};
  std::optional<JobQueue> threads_{};  // made by the first exchange with work for several
};

}  // namespace fulgur
