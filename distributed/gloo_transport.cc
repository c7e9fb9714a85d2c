#include "fulgur/distributed/gloo_transport.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fulgur/distributed/c10d_op.h"
#include "fulgur/distributed/gloo_adapter.h"

namespace fulgur {
namespace {

using Transfer = c10::intrusive_ptr<c10d::Work>;

constexpr int64_t kMostThatSendToAll = 8;  // ranks; larger groups forward small messages, in fewer but dependent rounds

// Messages between two ranks with the same tag arrive in the order in which they are sent.
constexpr int kDataTag = 0, kAbortTag = 1, kBarrierTag = 2, kSmallAllReduceTag = 3, kNumTags = 4;

// Throws what the backend throws, or std::runtime_error after an abort.
void wait_until(const Transfer& transfer, std::chrono::steady_clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  if (!transfer->wait(std::max(left, std::chrono::milliseconds(1))))
    throw std::runtime_error("the transfer was aborted");
}

}  // namespace

std::unique_ptr<HostTransport> connect_gloo(const GroupConfig& group) {
  if (!group.device.is_cpu() || !group.transport.may_use(TransportKind::gloo)) return nullptr;
  auto backend = make_gloo_backend(group);
  backend->setTimeout(group.timeout);
  return std::make_unique<GlooTransport>(std::move(backend), group.timeout, group.transport);
}

GlooTransport::GlooTransport(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout,
                             const TransportOptions& options)
    : backend_(std::move(backend)),
      timeout_(timeout),
      rank_order_all_reduce_(options.rank_order_all_reduce),
      staging_bytes_(options.staging_bytes.value_or(8 << 20)),
      rank_(backend_->getRank()),
      world_size_(backend_->getSize()) {}

GlooTransport::Transfer GlooTransport::send(at::Tensor slice, int64_t peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return backend_->send(tensors, static_cast<int>(peer), tag);
}

GlooTransport::Transfer GlooTransport::receive(at::Tensor slice, int64_t peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return backend_->recv(tensors, static_cast<int>(peer), tag);
}

at::Tensor GlooTransport::staging(const at::Tensor& like, int64_t num_elements) {
  const int64_t num_bytes = num_elements * like.element_size();
  if (!staging_.defined() || staging_.numel() < num_bytes) staging_ = at::empty({num_bytes}, at::kByte);
  return staging_.narrow(0, 0, num_bytes).view(like.scalar_type());
}

// Sends chunk by chunk, in the order in which the owners receive.
std::vector<GlooTransport::Transfer> GlooTransport::send_to_owners(const at::Tensor& flat, const RankRanges& ranges,
                                                                   int64_t chunk_size) {
  std::vector<Transfer> sends;
  for (int64_t begin = 0; begin < ranges.range(0, flat).size(); begin += chunk_size) {
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      const ElementRange range = ranges.range(peer, flat);
      if (begin >= range.size()) continue;
      sends.push_back(
          send(flat.narrow(0, range.begin + begin, std::min(chunk_size, range.size() - begin)), peer, kDataTag));
    }
  }
  return sends;
}

// After an error the ranks may be at different messages, and some messages may still arrive: the group is dead, and
// abort() makes the ranks fail that wait for a message of this rank.
template <class Body>
void GlooTransport::run(const Body& body) {
  rethrow_error();
  try {
    body();
  } catch (...) {
    keep_error(std::current_exception());
    abort();
    throw;
  }
}

void GlooTransport::rethrow_error() const {
  const std::lock_guard lock(error_mutex_);
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void GlooTransport::keep_error(const std::exception_ptr& error) {
  const std::lock_guard lock(error_mutex_);
  if (error_ == nullptr) error_ = error;
}

void GlooTransport::all_reduce(const at::Tensor& flat, ReduceOp op) {
  const bool would_round_often =
      op == ReduceOp::sum && at::isReducedFloatingType(flat.scalar_type()) && world_size_ > 2;
  if (rank_order_all_reduce_ || would_round_often) {
    const RankRanges ranges = RankRanges::of_whole(flat, world_size_);
    reduce_scatter(flat, op, ranges.of(flat, rank_), ranges);
    return all_gather(flat, ranges);
  }
  run([&] {
    std::vector<at::Tensor> tensors{flat};
    backend_->allreduce(tensors, {.reduceOp = c10d_op(op), .timeout = timeout_})->wait();
  });
}

void GlooTransport::broadcast(const at::Tensor& flat, int64_t root) {
  run([&] {
    std::vector<at::Tensor> tensors{flat};
    backend_->broadcast(tensors, {.rootRank = root, .timeout = timeout_})->wait();
  });
}

void GlooTransport::reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into,
                                   const RankRanges& ranges) {
  run([&] { scatter(flat, op, into, ranges); });
}

void GlooTransport::all_gather(const at::Tensor& flat, const RankRanges& ranges) {
  run([&] { gather(flat, ranges); });
}

void GlooTransport::barrier() {
  run([&] { meet(); });
}

void GlooTransport::scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  const at::Tensor mine = ranges.of(flat, rank_);
  const int64_t num_peers = std::max<int64_t>(world_size_ - 1, 1);
  const int64_t largest_range = std::max<int64_t>(ranges.range(0, flat).size(), 1);
  const int64_t chunk_size =
      std::clamp<int64_t>(staging_bytes_ / (2 * num_peers * flat.element_size()), 1, largest_range);
  const int64_t num_chunks = (mine.numel() + chunk_size - 1) / chunk_size;
  const at::Tensor stage = staging(flat, 2 * num_peers * chunk_size);
  const auto chunk_of = [&](const at::Tensor& tensor, int64_t chunk) {
    return tensor.narrow(0, chunk * chunk_size, std::min(chunk_size, mine.numel() - chunk * chunk_size));
  };
  const auto slot_of = [&](int64_t chunk, int64_t peer) {
    return chunk % 2 * num_peers + (peer < rank_ ? peer : peer - 1);
  };
  const auto staged = [&](int64_t chunk, int64_t peer) {
    return stage.narrow(0, slot_of(chunk, peer) * chunk_size, chunk_of(mine, chunk).numel());
  };
  std::vector<Transfer> receives(static_cast<size_t>(2 * num_peers));
  const auto receive_of = [&](int64_t chunk, int64_t peer) -> Transfer& {
    return receives[static_cast<size_t>(slot_of(chunk, peer))];
  };
  const auto start_receives = [&](int64_t chunk) {
    for (int64_t peer = 0; peer < world_size_ && chunk < num_chunks; ++peer) {
      if (peer != rank_) receive_of(chunk, peer) = receive(staged(chunk, peer), peer, kDataTag);
    }
  };

  start_receives(0);
  start_receives(1);
  const std::vector<Transfer> sends = send_to_owners(flat, ranges, chunk_size);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    combine_in_rank_order(chunk_of(into, chunk), chunk_of(mine, chunk), rank_, world_size_, op, [&](int64_t peer) {
      wait_until(receive_of(chunk, peer), deadline);
      return staged(chunk, peer);
    });
    start_receives(chunk + 2);
  }
  for (const Transfer& transfer : sends) wait_until(transfer, deadline);
}

void GlooTransport::gather(const at::Tensor& flat, const RankRanges& ranges) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  const at::Tensor mine = ranges.of(flat, rank_);
  std::vector<Transfer> transfers;
  for (int64_t step = 1; step < world_size_; ++step) {
    const int64_t peer = (rank_ + world_size_ - step) % world_size_;
    const ElementRange theirs = ranges.range(peer, flat);
    if (theirs.size() > 0) transfers.push_back(receive(theirs.of(flat), peer, kDataTag));
  }
  for (int64_t step = 1; step < world_size_ && mine.numel() > 0; ++step) {
    transfers.push_back(send(mine, (rank_ + step) % world_size_, kDataTag));
  }
  for (const Transfer& transfer : transfers) wait_until(transfer, deadline);
}

// In round k every rank hears from the rank 2^k before it, and so, after the last round, indirectly from all. Source:
// Hensgen, Finkel and Manber 1988.
void GlooTransport::meet() {
  const Clock::time_point deadline = Clock::now() + timeout_;
  for (int64_t distance = 1; distance < world_size_; distance *= 2) {
    const Transfer heard =
        receive(at::empty({1}, at::kByte), (rank_ + world_size_ - distance) % world_size_, kBarrierTag);
    const Transfer told = send(at::empty({1}, at::kByte), (rank_ + distance) % world_size_, kBarrierTag);
    wait_until(heard, deadline);
    wait_until(told, deadline);
  }
}

class GlooTransport::Small final : public SmallAllReduce {
 public:
  Small(GlooTransport& transport, const at::Tensor& flat, ReduceOp op)
      : group_(transport),
        rank_(transport.rank_),
        flat_(flat),
        op_(op),
        deadline_(Clock::now() + transport.timeout_),
        received_(at::empty({transport.world_size_, flat.numel()}, flat.options())) {
    // The size is part of the tag, so that unequal calls never match: Gloo ends the process at a message too long.
    const int tag = kSmallAllReduceTag + static_cast<int>(flat_.nbytes()) * kNumTags;
    const int64_t world_size = transport.world_size_;
    for (int64_t step = 1; step < world_size; ++step) {
      const int64_t peer = (rank_ + world_size - step) % world_size;
      transfers_.push_back(transport.receive(received_[peer], peer, tag));
    }
    for (int64_t step = 1; step < world_size; ++step) {
      transfers_.push_back(transport.send(flat_, (rank_ + step) % world_size, tag));
    }
  }

  void finish() override {
    if (finished_.exchange(true)) {
      if (error_ != nullptr) std::rethrow_exception(error_);
      return;
    }
    try {
      for (const Transfer& transfer : transfers_) wait_until(transfer, deadline_);
    } catch (...) {
      error_ = std::current_exception();
      group_.keep_error(error_);
      group_.abort();
      throw;
    }
    combine_in_rank_order(flat_, flat_, rank_, received_.size(0), op_, [&](int64_t peer) { return received_[peer]; });
  }

  bool finished() const { return finished_; }

 private:
  GlooTransport& group_;
  const int64_t rank_;
  const at::Tensor flat_;
  const ReduceOp op_;
  const Clock::time_point deadline_;
  at::Tensor received_;  // [world_size, flat.numel()]
  std::vector<Transfer> transfers_;
  std::atomic<bool> finished_ = false;
  std::exception_ptr error_{};
};

// Brings the tensors of all ranks to every rank, which adds them, in log2(world size) rounds: in round k a rank passes
// on what it has, to the rank 2^k before it. Source: Bruck et al. 1997, https://doi.org/10.1109/71.642949.
void GlooTransport::reduce_in_few_messages(const at::Tensor& flat, ReduceOp op, Clock::time_point deadline) {
  // Row i is of the rank i after this one. The size is part of the tag, as with all small all_reduces.
  const at::Tensor rows = at::empty({world_size_, flat.numel()}, flat.options());
  const int tag = kSmallAllReduceTag + static_cast<int>(flat.nbytes()) * kNumTags;
  rows[0].copy_(flat);
  for (int64_t distance = 1; distance < world_size_; distance *= 2) {
    const int64_t count = std::min(distance, world_size_ - distance);
    const Transfer heard = receive(rows.narrow(0, distance, count), (rank_ + distance) % world_size_, tag);
    const Transfer told = send(rows.narrow(0, 0, count), (rank_ + world_size_ - distance) % world_size_, tag);
    wait_until(heard, deadline);
    wait_until(told, deadline);
  }
  combine_in_rank_order(flat, flat, rank_, world_size_, op,
                        [&](int64_t peer) { return rows[(peer + world_size_ - rank_) % world_size_]; });
}

// Keeps the result until it is finished: a transfer must not be destroyed earlier, unless the connections are closed.
std::shared_ptr<SmallAllReduce> GlooTransport::small_all_reduce(const at::Tensor& flat, ReduceOp op) {
  if (world_size_ > kMostThatSendToAll) {
    rethrow_error();
    return small_of_many_.start([&] {
      return [this, flat, op, deadline = Clock::now() + timeout_] {
        run([&] { reduce_in_few_messages(flat, op, deadline); });
      };
    });
  }
  std::shared_ptr<Small> small;
  run([&] { small = std::make_shared<Small>(*this, flat, op); });
  std::erase_if(small_, [](const auto& one) { return one->finished(); });
  small_.push_back(small);
  return small;
}

// Gloo has no call to abort, but closes all connections of a group when one receive times out. A receive from a rank
// that has gone fails at once and closes none, so every rank is tried.
void GlooTransport::abort() {
  for (int64_t step = 1; step < world_size_; ++step) {
    try {
      receive(at::empty({1}, at::kByte), (rank_ + step) % world_size_, kAbortTag)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
    }
  }
}

}  // namespace fulgur
