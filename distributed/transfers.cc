#include "distributed/transfers.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fulgur {
namespace {

void combine_piece(at::Tensor total, const at::Tensor& value, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      total.add_(value);
      return;
    case ReduceOp::min:
      at::minimum_out(total, total, value);
      return;
    case ReduceOp::max:
      at::maximum_out(total, total, value);
      return;
  }
}

}  // namespace

// In pieces so small that ATen stays on this thread: a second team of OpenMP threads would compete with the one that
// computes gradients.
void combine(const at::Tensor& total, const at::Tensor& value, ReduceOp op) {
  const int64_t size = total.numel();
  for (int64_t begin = 0; begin < size; begin += at::internal::GRAIN_SIZE) {
    const int64_t piece = std::min(at::internal::GRAIN_SIZE, size - begin);
    combine_piece(total.narrow(0, begin, piece), value.narrow(0, begin, piece), op);
  }
}

void wait_until(const c10::intrusive_ptr<c10d::Work>& transfer, std::chrono::steady_clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  if (!transfer->wait(std::max(left, std::chrono::milliseconds(1))))
    throw std::runtime_error("the transfer was aborted");
}

Transfers::Transfers(c10::intrusive_ptr<c10d::Backend> backend, TransferOptions options)
    : backend_(std::move(backend)), options_(options), rank_(backend_->getRank()), world_size_(backend_->getSize()) {}

Transfers::Transfer Transfers::send(at::Tensor slice, int64_t peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return backend_->send(tensors, static_cast<int>(peer), tag);
}

Transfers::Transfer Transfers::receive(at::Tensor slice, int64_t peer, int tag) {
  std::vector<at::Tensor> tensors{std::move(slice)};
  return backend_->recv(tensors, static_cast<int>(peer), tag);
}

at::Tensor Transfers::staging(const at::Tensor& like, int64_t num_elements) {
  const int64_t num_bytes = num_elements * like.element_size();
  if (!staging_.defined() || staging_.numel() < num_bytes) staging_ = at::empty({num_bytes}, at::kByte);
  return staging_.narrow(0, 0, num_bytes).view(like.scalar_type());
}

// Chunk by chunk, as the owners take them.
std::vector<Transfers::Transfer> Transfers::send_to_owners(const at::Tensor& flat, int64_t chunk_size) {
  std::vector<Transfer> sends;
  for (int64_t begin = 0; begin < rank_range(flat.numel(), 0, world_size_).size(); begin += chunk_size) {
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      const ElementRange range = rank_range(flat.numel(), peer, world_size_);
      if (begin >= range.size()) continue;
      sends.push_back(send(flat.narrow(0, range.begin + begin, std::min(chunk_size, range.size() - begin)), peer));
    }
  }
  return sends;
}

void Transfers::reduce_scatter(const at::Tensor& flat, ReduceOp op) {
  const at::NoGradGuard no_grad;
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  const at::Tensor mine = rank_range(flat.numel(), rank_, world_size_).of(flat);
  const int64_t num_peers = std::max<int64_t>(world_size_ - 1, 1);
  const int64_t largest_range = std::max<int64_t>(rank_range(flat.numel(), 0, world_size_).size(), 1);
  const int64_t chunk_size =
      std::clamp<int64_t>(options_.staging_bytes / (2 * num_peers * flat.element_size()), 1, largest_range);
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
      if (peer != rank_) receive_of(chunk, peer) = receive(staged(chunk, peer), peer);
    }
  };

  start_receives(0);
  start_receives(1);
  const std::vector<Transfer> sends = send_to_owners(flat, chunk_size);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const at::Tensor result = chunk_of(mine, chunk);
    for (int64_t peer = 0; peer < world_size_; ++peer) {
      if (peer != rank_) wait_until(receive_of(chunk, peer), deadline);
      // What ranks below this one sum to is gathered in the first one's stage, so that nothing needs a copy.
      if (peer == rank_ && rank_ > 0) combine(result, staged(chunk, 0), op);
      if (peer != rank_ && peer != 0) combine(peer < rank_ ? staged(chunk, 0) : result, staged(chunk, peer), op);
    }
    start_receives(chunk + 2);
  }
  for (const Transfer& transfer : sends) wait_until(transfer, deadline);
}

void Transfers::all_gather(const at::Tensor& flat) {
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  const at::Tensor mine = rank_range(flat.numel(), rank_, world_size_).of(flat);
  std::vector<Transfer> transfers;
  for (int64_t step = 1; step < world_size_; ++step) {
    const int64_t peer = (rank_ + world_size_ - step) % world_size_;
    const ElementRange theirs = rank_range(flat.numel(), peer, world_size_);
    if (theirs.size() > 0) transfers.push_back(receive(theirs.of(flat), peer));
  }
  for (int64_t step = 1; step < world_size_ && mine.numel() > 0; ++step) {
    transfers.push_back(send(mine, (rank_ + step) % world_size_));
  }
  for (const Transfer& transfer : transfers) wait_until(transfer, deadline);
}

// In round k every rank hears from the one 2^k before it, and so, in the end, of all. Source: Hensgen, Finkel and
// Manber 1988.
void Transfers::barrier() {
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  for (int64_t distance = 1; distance < world_size_; distance *= 2) {
    const Transfer heard =
        receive(at::empty({1}, at::kByte), (rank_ + world_size_ - distance) % world_size_, kBarrierTag);
    const Transfer told = send(at::empty({1}, at::kByte), (rank_ + distance) % world_size_, kBarrierTag);
    wait_until(heard, deadline);
    wait_until(told, deadline);
  }
}

// Gloo has no call for it, but gives up all connections of a group when one receive runs out of time.
void Transfers::abort() {
  try {
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    backend_->recv(nothing, static_cast<int>((rank_ + 1) % world_size_), kAbortTag)->wait(std::chrono::milliseconds(1));
  } catch (const std::exception&) {
  }
}

}  // namespace fulgur
