#include "distributed/small_all_reduce.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <utility>

#include "distributed/transfers.h"

namespace fulgur {

SmallAllReduce::SmallAllReduce(c10d::Backend& backend, at::Tensor flat, ReduceOp op, std::chrono::milliseconds timeout)
    : rank_(backend.getRank()),
      flat_(std::move(flat)),
      op_(op),
      deadline_(std::chrono::steady_clock::now() + timeout),
      received_(at::empty({backend.getSize(), flat_.numel()}, flat_.options())) {
  const int64_t world_size = backend.getSize();
  for (int64_t step = 1; step < world_size; ++step) {
    const int64_t peer = (rank_ + world_size - step) % world_size;
    std::vector<at::Tensor> theirs{received_[peer]};
    transfers_.push_back(backend.recv(theirs, static_cast<int>(peer), kSmallAllReduceTag));
  }
  for (int64_t step = 1; step < world_size; ++step) {
    std::vector<at::Tensor> mine{flat_};
    transfers_.push_back(backend.send(mine, static_cast<int>((rank_ + step) % world_size), kSmallAllReduceTag));
  }
}

SmallAllReduce::~SmallAllReduce() {
  try {
    finish();
  } catch (const std::exception&) {
  }
}

void SmallAllReduce::finish() {
  if (std::exchange(finished_, true)) return;
  for (const Transfer& transfer : transfers_) wait_until(transfer, deadline_);
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
