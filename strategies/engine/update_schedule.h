#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include "fulgur/core/optimizer.h"
#include "fulgur/device/stream_worker.h"
#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_sums.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/parameter_versions.h"

namespace fulgur {

// The threads of a rank for updates on the host.
struct UpdateWorkers {
  int64_t count = 0;
  int64_t number_of_first = 0;  // index among the workers of all ranks, which are bound to cores in order
};

// Decides when a rank updates its ranges, and when the parameters change: in the step that computed the gradients, or
// delayed, concurrently with the next step. Ranges are taken in the order of forward: each is published, copied to
// the device and gathered while later ranges are updated. Parameters change only between the call and the return of
// step() and drain(), on a GPU in the order of the caller's stream.
//   A delayed update keeps the settings of its groups, the factor and the memory of its gradients; the next call throws
// the exception of a failed one. If another delayed update follows, forward reads parameters that are ahead by a
// prediction of the update in progress, because the new gradient will be applied there. Otherwise forward reads the
// exact parameters.
// Ownership: borrows the constructor's arguments, owns its threads. Threading: the training thread.
// Source: Ren et al. 2021, arXiv:2101.06840, section 5.2 (one-step delayed parameter update).
class UpdateSchedule {
 public:
  // Sections with a copy of their parameters are updated by the workers, with one intra-op thread each, bound to a core
  // if the process has more than 8 cores; on a GPU they are updated on a second stream. Other sections are updated in
  // step(). `data` are the ranks that share the shards.
  UpdateSchedule(const FlatParameters& parameters, const Optimizers& optimizers, OptimizerShard& shard,
                 GradientSums& sums, Collective& data, c10::Device device, const UpdateWorkers& workers);
  ~UpdateSchedule();
  UpdateSchedule(const UpdateSchedule&) = delete;
  UpdateSchedule& operator=(const UpdateSchedule&) = delete;

  // Completes the previous update, then updates by the sums: at once, or in the background if `late`.
  struct LateOptions {
    optim::PredictBy predict = optim::PredictBy::none;
    std::vector<double> next_lr{};  // by group: learning rates of the next update; empty: as in this one
  };
  void step(size_t optimizer, const GradientTransform& transform, const LateOptions* late);

  // Completes the update in progress.
  void drain();

  // Waits until the update in progress is computed; the parameters do not change until it is completed.
  void wait() const;

  // The copies of the parameters are renewed: from now on, look for what others write to parameters.
  void remember_versions() { versions_.remember(parameters_); }
  void remember_new_versions() { versions_.remember_new(parameters_); }

  // Resumes from a checkpoint with a delayed update of these buckets in progress, which is already computed.
  void resume_late(const std::vector<bool>& buckets);

  // The memory, by section, that held the gradients of a bucket which the update in progress changes. For 32- and
  // 64-bit parameters the update has replaced them by the values that forward reads once the update is completed.
  const std::vector<at::Tensor>& late_sums(size_t bucket) const;

  // The number of workers per rank if num_ranks share num_cores. Threads that feed a GPU keep cores to themselves:
  // the training thread, the backward thread, the thread that copies gradients to the host, and the thread that
  // publishes.
  static int64_t default_workers(int64_t num_cores, int64_t num_ranks, bool on_gpu);

  bool updates(size_t bucket) const;  // whether the update in progress changes the bucket

  bool is_late() const { return late_ != nullptr; }  // a delayed update is in progress

 private:
  struct Update;

  std::unique_ptr<Update> start(size_t optimizer, const GradientTransform& transform, const LateOptions* late);
  void start_bucket(Update& update, size_t bucket);
  void finish(Update& update, bool for_forward);
  void finish_late(bool for_forward);
  std::function<void()> publication(const Update& update, size_t bucket, bool for_forward);
  void queue_publication(const Update& update, size_t bucket, bool for_forward);
  void take_writes();
  StreamWorker& worker_of(const OptimizerShard::Section& section, int64_t number);

  const FlatParameters& parameters_;
  const Optimizers& optimizers_;
  OptimizerShard& shard_;
  GradientSums& sums_;
  Collective& data_;
  std::unique_ptr<Update> late_;
  ParameterVersions versions_;
  std::vector<std::shared_future<void>> published_;     // by bucket: a GPU has copied the last update; invalid on a CPU
  std::vector<std::unique_ptr<StreamWorker>> workers_;  // for updates on the host
  StreamWorker device_worker_;                          // for delayed updates on the device, and for publishing
};

}  // namespace fulgur
