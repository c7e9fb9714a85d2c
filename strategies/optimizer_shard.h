#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/optimizer.h"
#include "distributed/collective.h"
#include "optim/element_wise_optimizer.h"
#include "strategies/flat_parameters.h"

namespace fulgur {

// A part of a parameter: what of it lies in a rank's range of its bucket.
struct Piece {
  size_t slot;    // of the bucket
  int64_t begin;  // in the parameter, in the order of its memory
  int64_t num_elements;
  int64_t offset;  // in the range

  bool operator==(const Piece&) const = default;
};

// The pieces of a bucket in a range of it, in order. Padding belongs to none.
std::vector<Piece> pieces_in(const FlatParameters::Bucket& bucket, ElementRange range);

// The part of the optimizers' work that one rank does, and the state for it: range r of every bucket belongs to rank r
// (rank_range), so that a reduce_scatter of a bucket is its gradient, and all ranks do as much.
// Ownership: borrows parameters and optimizers, owns the state. Threading: one thread at a time.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054.
class OptimizerShard {
 public:
  // The state of a whole parameter; the tensors have its shape. Without updates there are none.
  struct ParameterState {
    int64_t num_updates = 0;
    std::map<std::string, at::Tensor, std::less<>> tensors{};  // by StateField::name; "master" where it is of 16 bits
  };

  // By parameter, which stays the same tensor when it goes to other buckets.
  using States = std::map<const c10::TensorImpl*, ParameterState>;

  // Throws UsageError for an optimizer that needs whole tensors.
  OptimizerShard(const FlatParameters& parameters, const Optimizers& optimizers, int64_t rank, int64_t world_size);

  ElementRange range(size_t bucket) const;

  // Updates this rank's range of a bucket by its gradient, a tensor as long as the range. Slots whose `used` is 0 are
  // left alone.
  void update(size_t bucket, const at::Tensor& gradient, const std::vector<double>& used,
              const GradientTransform& transform);

  // State of one parameter, from all ranks or for them: each calls it with the same slot.
  ParameterState gather(size_t bucket, size_t slot, Collective& group) const;
  void set(size_t bucket, size_t slot, const ParameterState& state);

  // Of all parameters. Needs the memory of the whole state, on every rank, while it lasts.
  States gather_all(Collective& group) const;
  void set_all(const States& states);  // parameters that are not in it start anew

  int64_t num_state_bytes() const;  // on this rank

 private:
  struct Part {  // of one bucket
    std::vector<Piece> pieces;
    std::vector<at::Tensor> tensors;  // views of the bucket, by piece
    std::vector<optim::ElementWiseOptimizer::State> states;
  };
  optim::ElementWiseOptimizer& optimizer_of(size_t bucket) const;

  const FlatParameters& parameters_;
  const Optimizers& optimizers_;
  int64_t rank_, world_size_;
  std::vector<Part> parts_;  // by bucket
};

}  // namespace fulgur
