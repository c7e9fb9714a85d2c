#include "fulgur/strategies/engine/update_schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/trace.h"

namespace fulgur {
namespace {

constexpr size_t kFewCores = 8;  // threads are bound only if there are more cores
constexpr int64_t kThreadsThatFeedGpu = 4;

}  // namespace

struct UpdateSchedule::Update {
  std::vector<Optimizer::Group> groups;
  GradientTransform transform;       // for the device
  GradientTransform host_transform;  // the same for the host
  bool is_late;
  std::vector<OptimizerShard::Late> late{};                   // by group, if the update is delayed
  std::vector<std::vector<at::Tensor>> sums{};                // by bucket and section; empty: the bucket is left alone
  std::vector<std::vector<double>> used{};                    // by bucket and slot
  std::vector<std::vector<std::shared_future<void>>> done{};  // by bucket

  ~Update() {  // workers use this object
    for (const auto& parts : done) {
      for (const auto& part : parts) part.wait();
    }
  }
};

UpdateSchedule::UpdateSchedule(const FlatParameters& parameters, const Optimizers& optimizers, OptimizerShard& shard,
                               GradientSums& sums, Collective& data, c10::Device device, const UpdateWorkers& workers)
    : parameters_(parameters),
      optimizers_(optimizers),
      shard_(shard),
      sums_(sums),
      data_(data),
      device_worker_(device, {.one_thread = device.is_cpu()}) {
  const std::vector<int> cores = cores_of_process();
  for (int64_t w = 0; w < workers.count; ++w) {
    const auto place = static_cast<size_t>(workers.number_of_first + w) % cores.size();
    workers_.push_back(std::make_unique<StreamWorker>(
        c10::kCPU, StreamWorkerOptions{.one_thread = true,
                                       .core = cores.size() > kFewCores ? std::optional(cores[place]) : std::nullopt}));
  }
  remember_versions();
}

UpdateSchedule::~UpdateSchedule() {
  for (const auto& published : published_) {
    if (published.valid()) published.wait();  // a GPU reads memory of the shard until then
  }
}

int64_t UpdateSchedule::default_workers(int64_t num_cores, int64_t num_ranks, bool on_gpu) {
  return std::max<int64_t>(1, num_cores / num_ranks - (on_gpu ? kThreadsThatFeedGpu : 0));
}

void UpdateSchedule::step(size_t optimizer, const GradientTransform& transform, const LateOptions* late) {
  take_writes();
  finish_late(/*for_forward=*/late != nullptr);
  std::unique_ptr<Update> update = start(optimizer, transform, late);
  if (late != nullptr) {
    late_ = std::move(update);
  } else {
    finish(*update, /*for_forward=*/false);
  }
}

void UpdateSchedule::drain() {
  if (late_ != nullptr) take_writes();
  finish_late(/*for_forward=*/false);
}

// After an exception the update stays in progress, so that a partial result is not taken for the whole.
void UpdateSchedule::finish_late(bool for_forward) {
  if (late_ == nullptr) return;
  finish(*late_, for_forward);
  late_ = nullptr;
}

void UpdateSchedule::wait() const {
  if (late_ == nullptr) return;
  for (const auto& parts : late_->done) {
    for (const auto& part : parts) part.get();
  }
}

bool UpdateSchedule::updates(size_t bucket) const {
  return late_ != nullptr && bucket < late_->sums.size() && !late_->sums[bucket].empty();
}

const std::vector<at::Tensor>& UpdateSchedule::late_sums(size_t bucket) const { return late_->sums[bucket]; }

void UpdateSchedule::resume_late(const std::vector<bool>& buckets) {
  late_ = std::make_unique<Update>(Update{.groups = {}, .transform = {}, .host_transform = {}, .is_late = true});
  std::promise<void> computed;
  computed.set_value();
  const std::shared_future<void> done = computed.get_future().share();
  for (size_t b = 0; b < buckets.size(); ++b) {
    late_->sums.push_back(buckets[b] ? shard_.make_sums(b) : std::vector<at::Tensor>());
    late_->done.push_back({done});
  }
}

std::unique_ptr<UpdateSchedule::Update> UpdateSchedule::start(size_t optimizer, const GradientTransform& transform,
                                                              const LateOptions* late) {
  auto update = std::make_unique<Update>(Update{.groups = optimizers_[optimizer].groups(),
                                                .transform = transform,
                                                .host_transform = transform,
                                                .is_late = late != nullptr});
  for (size_t g = 0; late != nullptr && g < update->groups.size(); ++g) {
    update->late.push_back({late->predict, late->next_lr.empty() ? update->groups[g].lr : late->next_lr[g]});
  }
  if (transform.factor.defined() && !workers_.empty()) update->host_transform.factor = transform.factor.to(c10::kCPU);
  const size_t num_buckets = parameters_.buckets().size();
  published_.resize(num_buckets);
  update->sums.resize(num_buckets);
  update->done.resize(num_buckets);
  for (size_t b = 0; b < num_buckets; ++b) {
    const std::vector<double>& used = sums_.used(b);
    update->used.push_back(used);
    if (parameters_.buckets()[b].optimizer != optimizer || shard_.sections(b).empty() ||
        std::ranges::all_of(used, [](double n) { return n == 0; })) {
      continue;
    }
    update->sums[b] = update->is_late ? sums_.take(b) : sums_.of(b);
    if (update->is_late) shard_.begin_late(b);
  }
  for (size_t b = num_buckets; b-- > 0;) start_bucket(*update, b);
  return update;
}

StreamWorker& UpdateSchedule::worker_of(const OptimizerShard::Section& section, int64_t number) {
  return section.on_host || section.copy.is_cpu() ? *workers_[static_cast<size_t>(number)] : device_worker_;
}

// Starts the update of sections with a copy of their parameters.
void UpdateSchedule::start_bucket(Update& update, size_t b) {
  for (size_t s = 0; s < update.sums[b].size(); ++s) {
    const OptimizerShard::Section& section = shard_.sections(b)[s];
    if (!section.copy.defined()) continue;
    for (int64_t w = 0; w < section.num_workers; ++w) {
      const std::shared_future<void> before = section.on_host ? published_[b] : std::shared_future<void>();
      update.done[b].push_back(worker_of(section, w).run([this, &update, &section, before, b, s, w] {
        if (before.valid()) before.get();
        const trace::Span span("update");
        const size_t group = parameters_.buckets()[b].group;
        shard_.update(b, s, w, update.groups[group], update.sums[b][s], update.used[b],
                      section.on_host ? update.host_transform : update.transform,
                      update.is_late ? &update.late[group] : nullptr);
      }));
    }
  }
}

// What others have written to parameters since the last update goes into their copies, from which the parameters would
// otherwise be overwritten. It is lost where an update in progress has begun without it, and where the optimizer has
// masters, of which the parameters are roundings.
void UpdateSchedule::take_writes() {
  for (size_t b = 0; b < parameters_.buckets().size(); ++b) {
    const std::string* const written = versions_.written(parameters_, b);
    if (written == nullptr) continue;
    const bool is_late = updates(b);
    if (!is_late) shard_.copy_parameters(b);
    if (is_late || shard_.has_masters(b)) versions_.warn_of_lost_write(*written);
    versions_.remember(parameters_, b);
  }
}

// Returns a job that publishes a bucket. The job holds all that it needs of the update, because an error may destroy
// the update before a worker runs the job.
std::function<void()> UpdateSchedule::publication(const Update& update, size_t bucket, bool for_forward) {
  if (!update.is_late) return [this, bucket] { shard_.publish(bucket); };
  if (!for_forward) return [this, bucket] { shard_.publish_exact(bucket); };
  return [this, bucket, gradients = update.sums[bucket], used = sums_.used(bucket)] {
    shard_.publish_for_forward(bucket, gradients, used);
  };
}

// On a GPU publishing a bucket is queued in the order of the training thread's stream: after the work that reads the
// old parameters, before the work that reads the new ones. The host waits only before it overwrites memory that the GPU
// copies from.
void UpdateSchedule::queue_publication(const Update& update, size_t bucket, bool for_forward) {
  publication(update, bucket, for_forward)();
  published_[bucket] = device_worker_.run([] {});  // done when the device has done what is queued here
}

void UpdateSchedule::finish(Update& update, bool for_forward) {
  const trace::Span span("publish");
  published_.resize(parameters_.buckets().size());
  std::vector<Work> gathering;
  std::optional<size_t> publishing;
  std::shared_future<void> published;
  const auto gather = [&] {
    if (!publishing) return;
    if (published.valid()) published.get();
    if (shard_.range(*publishing).size() == parameters_.buckets()[*publishing].flat.numel()) return;
    gathering.push_back(data_.all_gather(parameters_.buckets()[*publishing].flat));
  };
  for (size_t b = update.sums.size(); b-- > 0;) {  // buckets that were appended meanwhile have no part in it
    if (update.sums[b].empty()) continue;
    const auto& bucket = parameters_.buckets()[b];
    for (size_t s = 0; s < update.sums[b].size(); ++s) {
      if (shard_.sections(b)[s].copy.defined()) continue;
      shard_.update(b, s, 0, update.groups[bucket.group], update.sums[b][s], update.used[b], update.transform,
                    /*late=*/nullptr);
    }
    for (const auto& part : update.done[b]) part.get();
    gather();
    publishing = b;
    published = {};
    if (!bucket.flat.is_cpu()) {
      if (!update.done[b].empty()) queue_publication(update, b, for_forward);
      gather();
      publishing.reset();
    } else if (shard_.publishes_at_once(b)) {
      publication(update, b, for_forward)();
    } else if (!update.done[b].empty()) {
      published = device_worker_.run(publication(update, b, for_forward));
    }
    for (const auto& slot : bucket.slots) slot.param.unsafeGetTensorImpl()->bump_version();  // autograd sees the change
  }
  gather();
  for (Work& work : gathering) work.wait();
  for (size_t b = 0; update.is_late && b < update.sums.size(); ++b) {
    if (!update.sums[b].empty()) sums_.give_back(b, std::move(update.sums[b]));
  }
  remember_versions();
}

}  // namespace fulgur
