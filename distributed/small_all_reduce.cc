#include "distributed/small_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "distributed/transfers.h"

namespace fulgur {
namespace {

constexpr int64_t kMaxReceivedBytes = 64 << 10;

}  // namespace

bool SmallAllReduce::is_small(const at::Tensor& flat, int64_t world_size) {
  return static_cast<int64_t>(flat.nbytes()) * (world_size - 1) <= kMaxReceivedBytes;
}

SmallAllReduce::SmallAllReduce(c10d::Backend& backend, at::Tensor flat, ReduceOp op, std::chrono::milliseconds timeout)
    : rank_(backend.getRank()),
      flat_(std::move(flat)),
      op_(op),
      deadline_(std::chrono::steady_clock::now() + timeout),
      received_(at::empty({backend.getSize(), flat_.numel()}, flat_.options())) {
  // Messages of ranks that disagree must not meet: Gloo ends the process at one that is too long.
  const int tag = kSmallAllReduceTag + static_cast<int>(flat_.nbytes()) * kNumTags;
  const int64_t world_size = backend.getSize();
  for (int64_t step = 1; step < world_size; ++step) {
    const int64_t peer = (rank_ + world_size - step) % world_size;
    std::vector<at::Tensor> theirs{received_[peer]};
    transfers_.push_back(backend.recv(theirs, static_cast<int>(peer), tag));
  }
  for (int64_t step = 1; step < world_size; ++step) {
    std::vector<at::Tensor> mine{flat_};
    transfers_.push_back(backend.send(mine, static_cast<int>((rank_ + step) % world_size), tag));
  }
}

void SmallAllReduce::finish() {
  if (std::exchange(finished_, true)) {
    if (error_ != nullptr) std::rethrow_exception(error_);
    return;
  }
  try {
    for (const Transfer& transfer : transfers_) wait_until(transfer, deadline_);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  add_up();
}

void SmallAllReduce::add_up() {
  const at::NoGradGuard no_grad;
  const int64_t world_size = received_.size(0);
  if (rank_ > 0) {
    const at::Tensor below = received_[0];
    for (int64_t peer = 1; peer < rank_; ++peer) combine(below, received_[peer], op_);
    combine(flat_, below, op_);
  }
  for (int64_t peer = rank_ + 1; peer < world_size; ++peer) combine(flat_, received_[peer], op_);
}

}  // namespace fulgur
