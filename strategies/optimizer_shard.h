#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/state_range.h"
#include "core/optimizer.h"
#include "device/host_arena.h"
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

struct ShardOptions {
  int64_t rank = 0;        // that has range `rank` of every bucket
  int64_t world_size = 1;  // 1: the whole of it
  double host_ratio = 0;   // of each range: that part has its state, gradients and a copy of its parameters on the host
  bool copies = false;     // so has the rest a copy of its parameters, where it is
  int64_t num_workers = 1;    // threads that share the part on the host
  int64_t gradient_sums = 1;  // how often make_sums() will be called for a bucket
  bool accumulates = false;   // micro-batches are added up: sums of 16-bit gradients are fp32
  int64_t ranks_on_host = 1;  // that need as much memory of it
};

// The part of the optimizers' work that one rank does, and the state for it: range r of every bucket belongs to rank r
// (rank_range), so that a reduce_scatter of a bucket is its gradient, and all ranks do as much.
//   A range has one section, or two if a part of it is on the host. The updates of a section with a copy of its
// parameters go there, and reach the parameters by publish(); others are made in place. What else is written to
// parameters that have a copy is lost. A copy of a whole bucket on a CPU costs no pass to publish: a late update
// reads the parameters and writes the copy, and then the two exchange their memory.
// Ownership: borrows parameters and optimizers, owns the state. Threading: one thread at a time, but update() of
// different buckets, sections or workers may run at once.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021, arXiv:2101.06840 (ZeRO-Offload).
class OptimizerShard {
 public:
  struct Section {
    ElementRange range;  // of the bucket
    bool on_host = false;
    at::Tensor copy{};       // of its parameters; undefined: updates are made in place
    bool exchanges = false;  // it is the whole bucket, in the same memory: late, the two are exchanged
    int64_t num_workers = 1;
  };

  // Of whole parameters. By parameter, which stays the same tensor when it goes to other buckets.
  using States = std::map<const c10::TensorImpl*, ParameterState>;

  // Throws UsageError for an optimizer that needs whole tensors, and if the host has not the memory.
  OptimizerShard(const FlatParameters& parameters, const Optimizers& optimizers, const ShardOptions& options);

  ElementRange range(size_t bucket) const;
  const std::vector<Section>& sections(size_t bucket) const { return buckets_[bucket].sections; }

  // Memory for a gradient of each section of a bucket, where its state is: in its dtype, or for micro-batches in fp32.
  std::vector<at::Tensor> make_sums(size_t bucket);

  // Updates a worker's part of a section by the section's gradient, with the settings of `group`. Slots whose `used` is
  // 0 are left alone. `late`: others read the parameters meanwhile; if not, a copy that could be exchanged is not
  // needed, and the parameters are updated in place.
  void update(size_t bucket, size_t section, int64_t worker, const Optimizer::Group& group, const at::Tensor& gradient,
              const std::vector<double>& used, const GradientTransform& transform, bool late);

  // Brings what has been updated, `late` or not, to the parameters.
  void publish(size_t bucket, bool late) const;
  bool loses_writes(size_t bucket) const;  // of others to its parameters
  bool publishes_at_once(size_t bucket) const { return buckets_[bucket].sections.front().exchanges; }

  // State of one parameter, from all ranks or for them: each calls it with the same slot.
  ParameterState gather(size_t bucket, size_t slot, Collective& group) const;
  void set(size_t bucket, size_t slot, const ParameterState& state);

  // For a checkpoint: what this rank has of the state of a bucket's elements in `within`, and to go on from there. Of
  // slots without updates there is nothing. `copies`: also the parameters after the update under way, "next" where no
  // fp32 master says the same; `updated` if the bucket has a part in it, so that its copies are not published yet.
  std::vector<StateRange> state_ranges(size_t bucket, ElementRange within, bool copies, bool updated) const;
  std::vector<int64_t> num_updates(size_t bucket) const;  // by slot; 0 where this rank has no element
  void load_ranges(size_t bucket, const std::vector<int64_t>& num_updates, const ReadRange& read, bool copies);

  // Of all parameters. Needs the memory of the whole state, on every rank, while it lasts.
  States gather_all(Collective& group) const;
  void set_all(const States& states);  // parameters that are not in it are left alone

  int64_t host_bytes() const { return arena_ ? arena_->num_bytes() : 0; }  // gradients and copies, too

  int64_t num_workers() const { return options_.num_workers; }

  // How much of a range is on the host.
  static int64_t elements_on_host(int64_t num_elements, double ratio);

 private:
  struct Part {                       // of one worker
    int64_t begin;                    // in the section
    std::vector<Piece> pieces;        // of this part
    std::vector<at::Tensor> tensors;  // what is updated, by piece
    std::vector<at::Tensor> outs{};   // where the result goes; empty: there
    std::vector<optim::ElementWiseOptimizer::State> states;
    const at::Tensor& result(size_t piece) const { return outs.empty() ? tensors[piece] : outs[piece]; }
  };
  struct Bucket {
    std::vector<Section> sections;
    std::vector<std::vector<Part>> parts;  // by section and worker
  };
  void cut(size_t bucket);
  void make_copies(size_t bucket);
  void make_parts(size_t bucket);
  void make_host_states(size_t bucket, Part& part);
  c10::ScalarType sum_dtype(size_t bucket) const;
  int64_t arena_bytes() const;
  optim::ElementWiseOptimizer& optimizer_of(size_t bucket) const;
  template <class Visit>
  void for_each_part(size_t bucket, const Visit& visit) const;
  void load_piece(size_t bucket, Part& part, size_t piece, const ParameterState& saved);

  const FlatParameters& parameters_;
  const Optimizers& optimizers_;
  ShardOptions options_;
  std::optional<HostArena> arena_;
  std::vector<Bucket> buckets_;
};

}  // namespace fulgur
