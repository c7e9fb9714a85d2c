#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "core/optimizer.h"
#include "device/side_worker.h"
#include "distributed/collective.h"
#include "strategies/flat_parameters.h"
#include "strategies/gradient_reducer.h"
#include "strategies/optimizer_shard.h"

namespace fulgur {

// When a rank updates its ranges, and when the parameters get to see it: in the step whose gradients they are, or late,
// beside the next step. Ranges are taken in the order of forward: each is published, copied up and gathered, while
// later ones are updated. Parameters change in step() and drain() alone, on the thread that calls them, or before they
// return.
//   A late update takes the settings of its groups, the factor and the memory of its gradients with it; an exception in
// it is thrown by the next call.
// Ownership: borrows all it is given, owns its threads. Threading: the training thread.
// Source: Ren et al. 2021, arXiv:2101.06840, section 5.2 (one-step delayed parameter update).
class UpdateSchedule {
 public:
  // Sections with a copy of their parameters are updated on num_workers threads of one intra-op thread each, bound to
  // a core where the process has more than 8; on a GPU on a stream beside the one of the step. Others in step().
  UpdateSchedule(const FlatParameters& parameters, const Optimizers& optimizers, OptimizerShard& shard,
                 GradientReducer& reducer, Collective& data, c10::Device device, int64_t num_workers);
  ~UpdateSchedule();
  UpdateSchedule(const UpdateSchedule&) = delete;
  UpdateSchedule& operator=(const UpdateSchedule&) = delete;

  // Ends the update before, and makes that of the gradients that the reducer has, late or at once.
  void step(size_t optimizer, const GradientTransform& transform, bool late);

  // Ends the update before.
  void drain();

  // Waits until the update under way is computed; parameters stay as they are until it ends.
  void wait() const;

  // An update is under way that is computed, and lies in the shard's copies, as it was when a checkpoint was taken.
  void resume_late();

  // How many workers each of num_ranks that share num_cores has. Threads that feed a GPU keep cores to themselves: the
  // training thread, that of backward, the one that copies gradients down and the one that publishes.
  static int64_t default_workers(int64_t num_cores, int64_t num_ranks, bool on_gpu);

  bool updates(size_t bucket) const;  // with the update under way

  bool is_late() const { return late_ != nullptr; }  // an update is under way beside the step

 private:
  struct Update;

  std::unique_ptr<Update> start(size_t optimizer, const GradientTransform& transform, bool late);
  void start_bucket(Update& update, size_t bucket);
  void finish(Update& update);
  void tell_of_writes(const Update& update);
  SideWorker& worker_of(const OptimizerShard::Section& section, int64_t number);

  const FlatParameters& parameters_;
  const Optimizers& optimizers_;
  OptimizerShard& shard_;
  GradientReducer& reducer_;
  Collective& data_;
  std::unique_ptr<Update> late_;
  std::vector<std::vector<int64_t>> versions_;  // of the parameters when an update ended, by bucket and slot
  bool told_of_writes_ = false;
  std::vector<std::unique_ptr<SideWorker>> workers_;  // on the host
  SideWorker beside_;                                 // on the device: late updates there, and what is published
};

}  // namespace fulgur
