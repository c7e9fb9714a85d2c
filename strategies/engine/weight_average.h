#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "fulgur/base/state.h"
#include "fulgur/checkpoint/state_range.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_store.h"
#include "fulgur/strategies/engine/shard_groups.h"
#include "fulgur/strategies/strategy.h"

namespace fulgur {

// A running average of the parameters in buckets. Each rank keeps its range of every bucket, in fp32 (fp64 of fp64
// parameters): 4/N bytes for each parameter with N ranks. 16-bit parameters are averaged in their fp32 masters.
//   show() lets every rank's parameters be the average, hide() brings the trained values back. The parameters exchange
// their values with the average; of 16-bit parameters a rank keeps a copy of its range meanwhile.
// Ownership: borrows the constructor's arguments. Threading: the training thread; every rank makes the same calls.
// Source: Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407.
class WeightAverage {
 public:
  WeightAverage(const FlatParameters& parameters, GradientStore& store, ShardGroups& groups, c10::Device device)
      : parameters_(parameters), store_(store), groups_(groups), device_(device) {}

  // average += share * (parameters - average); the first call copies the parameters. A delayed update in progress must
  // be computed, and counts.
  void add(double share);
  void append();  // after buckets were appended; not while the average is shown

  void show();  // does nothing if there is no average yet
  void hide();

  // For checkpoints. While the average is shown, add_to() adds the trained values, which it hides, to the ranges of a
  // strategy's state as "raw", and the fp32 average of 16-bit parameters as "average". load() expects that the module
  // has the weights of the checkpoint; it restores the trained values and returns whether the checkpoint has an
  // average. `keeps`: this average is continued. Any earlier average is dropped.
  void add_to(StrategyState& state) const;
  bool load(const State& shared, const ReadRange& read, bool keeps);

 private:
  ElementRange range(size_t bucket) const;
  at::Tensor part(size_t bucket) const;  // this rank's range of the parameters
  void add(size_t bucket, double share);
  void take_new_buckets();
  void gather();

  const FlatParameters& parameters_;
  GradientStore& store_;
  ShardGroups& groups_;
  const c10::Device device_;            // where the averages are
  std::vector<at::Tensor> averages_{};  // by bucket; while shown, the trained values of fp32 and fp64 parameters
  std::vector<at::Tensor> raw_{};       // while shown: by bucket, the trained values of 16-bit parameters
  bool is_shown_ = false;
};

}  // namespace fulgur
