#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/distributed/collective.h"

namespace fulgur::testing {

// Rank 0 of several: every other rank has the same values as rank 0.
class OthersHaveTheSame : public Collective {
 public:
  explicit OthersHaveTheSame(int64_t world_size) : world_size_(world_size) {}
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return world_size_; }
  Work all_reduce(at::Tensor, ReduceOp) override { return {}; }
  Work reduce_scatter(at::Tensor flat, ReduceOp, at::Tensor into) override {
    if (into.defined()) into.copy_(rank_range(flat.numel(), 0, world_size_).of(flat));
    return {};
  }
  Work all_gather(at::Tensor flat) override {
    const at::Tensor own = rank_range(flat.numel(), 0, world_size_).of(flat);
    for (int64_t rank = 1; rank < world_size_; ++rank) {
      const ElementRange range = rank_range(flat.numel(), rank, world_size_);
      range.of(flat).copy_(own.narrow(0, 0, range.size()));
    }
    return {};
  }
  Work broadcast(at::Tensor, int64_t) override { return {}; }
  void barrier() override {}
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) override {
    return ranks.front() == 0 ? std::make_shared<OthersHaveTheSame>(std::ssize(ranks)) : nullptr;
  }
  void abort(const std::string&) noexcept override {}

 private:
  int64_t world_size_;
};

}  // namespace fulgur::testing
