#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/state_range.h"
#include "fulgur/core/optimizer.h"
#include "fulgur/device/host_arena.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/optim/element_wise_optimizer.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace fulgur {

// The part of a parameter that lies in a rank's range of its bucket.
struct Piece {
  size_t slot;    // index in the bucket
  int64_t begin;  // offset in the parameter, in memory order
  int64_t num_elements;
  int64_t offset;  // offset in the range

  bool operator==(const Piece&) const = default;
};

// The pieces of a bucket that lie in `range`, in order. Padding belongs to no piece.
std::vector<Piece> pieces_in(const FlatParameters::Bucket& bucket, ElementRange range);

// Elements of a bucket, from `begin` on, in a higher precision than the parameters have, or closer to the CPU.
struct ExactValues {
  int64_t begin;
  at::Tensor values;  // 1-dim
};

struct ShardOptions {
  int64_t rank = 0;           // this rank, which updates range `rank` of every bucket
  int64_t world_size = 1;     // 1: a range is the whole bucket
  double host_ratio = 0;      // share of each range whose state, gradients and parameter copy are on the host
  bool copies = false;        // the share on the device has a parameter copy, too
  int64_t num_workers = 1;    // CPU threads that share the update of a section
  int64_t gradient_sums = 1;  // number of calls of make_sums() per bucket
  bool accumulates = false;   // micro-batches are summed: sums of 16-bit gradients are fp32
  int64_t ranks_on_host = 1;  // ranks that each need as much memory of this host
};

// The part of the optimizers' work that one rank does, and the state for it: range r of every bucket belongs to rank
// r (rank_range), so that a reduce_scatter of a bucket yields the gradient of the range, and all ranks do the same
// amount of work.
//   A range has one section, or two if a part of it is on the host. A section with a copy of its parameters is
// updated in the copy, and publish() writes the copy to the parameters; other sections are updated in place. Other
// writes to parameters that have a copy are overwritten.
//   A delayed update leaves two results. The exact parameters lie in the copy (16-bit parameters: in the masters). The
// parameters for the next forward, which are ahead of the exact ones by the predicted next update, replace the gradient
// (16-bit parameters: the copy). If a section is a whole bucket on a CPU, publishing takes no pass over memory: the
// results exchange their memory with the parameters. Ownership: borrows parameters and optimizers, owns the state.
// Threading: one thread at a time, but update() of different buckets, sections or workers may run at once, and
// publish() beside update() of other buckets. Source: Rajbhandari et al. 2020, arXiv:1910.02054; Ren et al. 2021,
// arXiv:2101.06840 (ZeRO-Offload); prediction: Chen et al. 2018, arXiv:1809.02839 (SpecTrain).
class OptimizerShard {
 public:
  struct Section {
    ElementRange range;  // in the bucket
    bool on_host = false;
    at::Tensor copy{};      // copy of the section's parameters; undefined: updates are made in place
    bool is_whole = false;  // `copy` is of the whole bucket, on a CPU: updates without delay are made in place
    int64_t num_workers = 1;
  };

  // Throws UsageError for an optimizer that needs whole tensors, and if the host has too little memory.
  OptimizerShard(const FlatParameters& parameters, const Optimizers& optimizers, const ShardOptions& options);

  // Takes in the buckets that were appended to the parameters. Throws like the constructor.
  void append();

  ElementRange range(size_t bucket) const;
  const std::vector<Section>& sections(size_t bucket) const { return buckets_[bucket].sections; }

  // Makes memory for the gradient of each section of a bucket, on the device of the section's state: in the dtype of
  // the bucket, or, with `accumulates`, fp32 for 16-bit.
  std::vector<at::Tensor> make_sums(size_t bucket);

  // How a delayed update is made.
  struct Late {
    optim::PredictBy predict = optim::PredictBy::none;
    double next_lr = 0.0;  // learning rate of the update that is predicted
  };

  // Updates a worker's part of a section by the section's gradient, with the settings of `group`. Slots whose `used` is
  // 0 are left alone. With `late`, the next step reads the parameters while the update runs, and the gradient's memory
  // receives the values that publish_for_forward() writes afterwards. Call begin_late() before the delayed updates of a
  // bucket.
  void update(size_t bucket, size_t section, int64_t worker, const Optimizer::Group& group, const at::Tensor& gradient,
              const std::vector<double>& used, const GradientTransform& transform, const Late* late);
  void begin_late(size_t bucket);

  // These write an update to the parameters. publish() is for an update without delay. After a delayed update,
  // publish_for_forward() writes the values that the next step reads, and publish_exact() the exact parameters.
  // show_exact() also writes the exact parameters, but keeps the values for forward. `gradients`: by section, the
  // update's gradients, whose memory may hold the values for forward. `used` belongs to the next update: a slot that
  // the next update skips gets its exact values.
  void publish(size_t bucket);
  void publish_for_forward(size_t bucket, const std::vector<at::Tensor>& gradients,
                           const std::vector<double>& used) const;
  void publish_exact(size_t bucket) const;
  void show_exact(size_t bucket) const;
  bool has_masters(size_t bucket) const;  // from the first update on: the parameters are roundings of fp32 masters

  // Whether the training thread should publish the bucket: this rarely takes a pass over memory.
  bool publishes_at_once(size_t bucket) const { return buckets_[bucket].sections.front().is_whole; }

  // The more exact values that exist for a bucket's elements in `within`, in order: fp32 masters of 16-bit parameters,
  // copies on the host of parameters on a device and, with `late`, the results of the delayed update in progress, which
  // must be computed.
  std::vector<ExactValues> exact_values(size_t bucket, ElementRange within, bool late) const;

  // For checkpoints: state_ranges() returns the state that this rank has of a bucket's elements in `within`,
  // load_ranges() resumes from it. Slots without updates are left out. If a delayed update of the bucket is in
  // progress, `late` are tensors of the range's elements that are saved and loaded as well, by name.
  using LateTensors = std::vector<std::pair<std::string, at::Tensor>>;
  std::vector<StateRange> state_ranges(size_t bucket, ElementRange within, const LateTensors& late) const;
  std::vector<int64_t> num_updates(size_t bucket) const;  // by slot; 0 where this rank has no element
  void load_ranges(size_t bucket, const std::vector<int64_t>& num_updates, const ReadRange& read,
                   const LateTensors& late);

  // for_forward() returns the parameters that a delayed update has left for forward: one tensor of the range's
  // elements, on the CPU if a section is on the host. set_for_forward() writes them. `gradients` is that of
  // publish_for_forward().
  at::Tensor for_forward(size_t bucket, const std::vector<at::Tensor>& gradients) const;
  void set_for_forward(size_t bucket, const at::Tensor& values, const std::vector<at::Tensor>& gradients) const;

  void copy_parameters();  // renews the copies of sections after other writes to the parameters
  void copy_parameters(size_t bucket);

  int64_t host_bytes() const;  // including gradients and copies

  int64_t num_workers() const { return options_.num_workers; }

  // The number of a range's elements that are on the host.
  static int64_t elements_on_host(int64_t num_elements, double ratio);

 private:
  struct Part {     // the part of one worker
    int64_t begin;  // offset in the section
    std::vector<Piece> pieces;
    std::vector<at::Tensor> params;  // by piece: of the parameters
    std::vector<at::Tensor> copies;  // by piece: of the section's copy; empty if it has none
    std::vector<optim::ElementWiseOptimizer::State> states;
  };
  struct Bucket {
    bool has_old_copies = false;  // parameters of whole sections were updated in place since their copies were made
    std::vector<Section> sections;
    std::vector<std::vector<Part>> parts;  // by section and worker
    HostArena* arena = nullptr;            // for sections on the host
  };
  void cut(size_t bucket);
  void make_copies(size_t bucket);
  bool is_rounded(size_t bucket) const;  // the parameters have 16 bits
  void write_exact(const Part& part, size_t piece) const;
  const std::vector<at::Tensor>& what_is_updated(size_t bucket, const Section& section, const Part& part,
                                                 bool late) const;
  void make_parts(size_t bucket);
  void make_host_states(size_t bucket, Part& part);
  c10::ScalarType sum_dtype(size_t bucket) const;
  int64_t bytes_on_host(size_t bucket) const;
  optim::ElementWiseOptimizer& optimizer_of(size_t bucket) const;
  template <class Visit>
  void for_each_part(size_t bucket, const Visit& visit) const;
  void load_piece(size_t bucket, Part& part, size_t piece, const ParameterState& saved);

  const FlatParameters& parameters_;
  const Optimizers& optimizers_;
  ShardOptions options_;
  std::deque<HostArena> arenas_;  // one for each time that buckets came
  std::vector<Bucket> buckets_;
};

}  // namespace fulgur
