#include "fulgur/strategies/engine/gradient_sums.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "fulgur/base/trace.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/fused_update.h"

namespace fulgur {
namespace {

// Calls `visit(begin, end)` for the padding of a bucket.
template <class Visit>
void for_each_gap(const FlatParameters::Bucket& bucket, const Visit& visit) {
  int64_t end = 0;
  for (const auto& slot : bucket.slots) {
    if (slot.begin > end) visit(end, slot.begin);
    end = slot.begin + slot.num_elements;
  }
  if (bucket.flat.numel() > end) visit(end, bucket.flat.numel());
}

// Copies from a GPU to the host go through pinned memory: copies to other memory are several times slower.
at::Tensor brought_to(c10::Device device, const at::Tensor& part) {
  if (part.device() == device) return part;
  return at::empty(part.sizes(), part.options().device(device).pinned_memory(device.is_cpu())).copy_(part);
}

// True if one parameter fills the bucket, without padding.
bool fills_bucket_alone(const FlatParameters::Bucket& bucket) {
  return bucket.slots.size() == 1 && bucket.slots.front().num_elements == bucket.flat.numel();
}

}  // namespace

GradientSums::GradientSums(const FlatParameters& parameters, Collective& data, const ReduceOptions& options)
    : parameters_(parameters), data_(data), options_(options) {
  append();
}

GradientSums::~GradientSums() {
  for (const size_t b : in_flight_) {
    if (buckets_[b].kept.valid()) buckets_[b].kept.wait();  // the copy worker uses this object
  }
}

void GradientSums::append() {
  for (size_t b = buckets_.size(); b < parameters_.buckets().size(); ++b) {
    const size_t num_slots = parameters_.buckets()[b].slots.size();
    Bucket& bucket = buckets_.emplace_back();
    bucket.memory = options_.make_sums(b);
    bucket.arrived.resize(num_slots);
    bucket.used.assign(num_slots, 0.0);
  }
}

void GradientSums::begin(bool takes_norms) {
  takes_norms_ = takes_norms;
  forget_norms();
}

void GradientSums::forget_norms() {
  for (Bucket& bucket : buckets_) bucket.norms.clear();
}

void GradientSums::put(size_t b, size_t s, bool goes_soon) {
  const at::Tensor& param = parameters_.buckets()[b].slots[s].param;
  if (becomes_bucket(b, param.grad())) return make_bucket_of_gradient(b);
  ensure_memory(b);
  at::Tensor grad = std::exchange(param.mutable_grad(), {});
  // Gradients wait only for buckets that go soon: otherwise they would pile up.
  if (goes_soon && (copy_worker_fills(b) || fills_together(b))) {
    buckets_[b].arrived[s] = std::move(grad);
  } else {
    put_into_bucket(b, s, grad);
  }
}

void GradientSums::put_zero(size_t b, size_t s) {
  ensure_memory(b);
  buckets_[b].arrived[s].reset();
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  if (!buckets_[b].is_added_to) buckets_[b].gradients.narrow(0, slot.begin, slot.num_elements).zero_();
}

void GradientSums::put_into_bucket(size_t b, size_t s, const at::Tensor& grad) {
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  buckets_[b].is_added_to ? add_into(buckets_[b].gradients, slot, grad) : copy_into(buckets_[b].gradients, slot, grad);
}

// The type of a bucket's gradients on their way.
c10::ScalarType GradientSums::wire(size_t b) const {
  return options_.wire.value_or(parameters_.buckets()[b].flat.scalar_type());
}

// A gradient becomes the bucket if it would fill the bucket alone, and nothing else holds the tensor or its memory: the
// gradient of another parameter may be a view of the same memory.
bool GradientSums::becomes_bucket(size_t b, const at::Tensor& gradient) const {
  const FlatParameters::Bucket& bucket = parameters_.buckets()[b];
  return !reduces_in_sums(b) && fills_bucket_alone(bucket) && !buckets_[b].gradients.defined() &&
         gradient.layout() == at::kStrided && gradient.scalar_type() == wire(b) &&
         gradient.strides() == bucket.slots.front().param.strides() && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1;
}

void GradientSums::make_bucket_of_gradient(size_t b) {
  while (takes_memory_in_flight()) finish_oldest();
  Bucket& bucket = buckets_[b];
  const at::Tensor gradient = std::exchange(parameters_.buckets()[b].slots.front().param.mutable_grad(), {});
  bucket.gradients = gradient.as_strided({gradient.numel()}, {1});
  bucket.is_of_pool = bucket.is_in_sums = bucket.is_added_to = false;
}

// Whether a bucket gets the memory of the oldest one in flight, instead of new memory.
bool GradientSums::takes_memory_in_flight() const {
  if (in_flight_.size() < kPooledBuckets) return false;
  const Bucket& oldest = buckets_[in_flight_.front()];
  const auto is_ready = [](const auto& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  return options_.may_wait_for_memory || (oldest.kept.valid() ? is_ready(oldest.kept) : oldest.work.is_done());
}

// On a GPU one copy of many gradients takes one launch, while a copy of each gradient takes one launch each.
bool GradientSums::fills_together(size_t b) const { return !parameters_.buckets()[b].flat.is_cpu(); }

// The copy worker may fill the bucket later if no other rank waits for it.
bool GradientSums::copy_worker_fills(size_t b) const {
  return options_.copy_worker != nullptr && buckets_[b].is_in_sums && data_.world_size() == 1;
}

bool GradientSums::reduces_in_sums(size_t b) const {
  const std::vector<at::Tensor>& memory = buckets_[b].memory;
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  return memory.size() == 1 && memory.front().numel() == flat.numel() && memory.front().device() == flat.device() &&
         (data_.world_size() == 1 || (!buckets_[b].has_sums && memory.front().scalar_type() == wire(b)));
}

// True if reduce_scatter can write the sums directly, which saves a copy: first micro-batch, one section, same device
// and dtype.
bool GradientSums::can_reduce_into_sums(size_t b) const {
  const Bucket& bucket = buckets_[b];
  return !bucket.is_in_sums && !bucket.has_sums && bucket.memory.size() == 1 &&
         bucket.memory.front().device() == bucket.gradients.device() &&
         bucket.memory.front().scalar_type() == bucket.gradients.scalar_type();
}

void GradientSums::begin_in_sums(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.is_added_to = bucket.has_sums;
  if (!bucket.has_sums) bucket.sums = bucket.memory;
  at::Tensor& sum = bucket.sums.front();
  if (bucket.is_added_to) sum = sum.to(optim::widened(sum.scalar_type()));
  bucket.gradients = sum;
}

void GradientSums::ensure_memory(size_t b) {
  Bucket& bucket = buckets_[b];
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  if (bucket.gradients.defined()) return;
  bucket.is_in_sums = reduces_in_sums(b);
  bucket.is_of_pool = !bucket.is_in_sums;
  bucket.is_added_to = false;
  if (bucket.is_in_sums) return begin_in_sums(b);
  const auto find = [&] {
    return std::ranges::find_if(pool_, [&](const at::Tensor& memory) {
      return memory.scalar_type() == wire(b) && memory.numel() >= flat.numel();
    });
  };
  auto fits = find();
  while (fits == pool_.end() && takes_memory_in_flight()) {
    finish_oldest();
    fits = find();
  }
  if (fits == pool_.end()) {
    if (!pool_.empty()) pool_.erase(pool_.begin());
    bucket.gradients = data_.allocate(flat.numel(), flat.options().dtype(wire(b)));
    return;
  }
  bucket.gradients = fits->narrow(0, 0, flat.numel());
  pool_.erase(fits);
  for_each_gap(parameters_.buckets()[b],
               [&](int64_t begin, int64_t end) { bucket.gradients.narrow(0, begin, end - begin).zero_(); });
}

void GradientSums::launch(size_t b) {
  Bucket& bucket = buckets_[b];
  if (fills_together(b)) {
    move_into(bucket.gradients, parameters_.buckets()[b], bucket.arrived, bucket.is_added_to, /*together=*/true);
  }
  bucket.goes_into_sums = options_.shard && can_reduce_into_sums(b);
  if (bucket.goes_into_sums) {
    bucket.work = data_.reduce_scatter(bucket.gradients, ReduceOp::sum, bucket.memory.front());
  } else {
    bucket.work = options_.shard ? data_.reduce_scatter(bucket.gradients)
                                 : reduce_whole(data_, bucket.gradients, options_.rank_order);
  }
  if (copy_worker_fills(b) && in_flight_.size() >= kPooledBuckets) finish_oldest();
  in_flight_.push_back(b);
  bucket.kept = {};
  if (options_.copy_worker != nullptr && (takes_norms_ || !bucket.is_in_sums || copy_worker_fills(b))) {
    bucket.kept = options_.copy_worker->run([this, b] { add_to_sums(b); });
  }
}

void GradientSums::finish(const std::vector<std::span<const double>>& used) {
  while (!in_flight_.empty()) finish_oldest();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    std::ranges::transform(buckets_[b].used, used[b], buckets_[b].used.begin(), std::plus());
  }
}

// Runs on the copy worker's thread, or on the thread that calls finish_oldest().
void GradientSums::add_to_sums(size_t b) {
  const c10::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  bucket.work.wait();
  move_into(bucket.gradients, parameters_.buckets()[b], bucket.arrived, bucket.is_added_to, /*together=*/false);
  const auto measure = [&](const at::Tensor& sum) {
    if (takes_norms_) bucket.norms.push_back(joint_norm({sum}));
  };
  if (bucket.goes_into_sums) bucket.sums = bucket.memory;
  if (bucket.is_in_sums || bucket.goes_into_sums) {
    bucket.has_sums = true;
    return measure(bucket.sums.front());
  }
  const trace::Span span("copy down");
  const at::Tensor whole = bucket.gradients.narrow(0, 0, parameters_.buckets()[b].flat.numel());
  const at::Tensor kept =
      options_.shard ? rank_range(whole.numel(), data_.rank(), data_.world_size()).of(whole) : whole;
  if (!bucket.has_sums) bucket.sums = bucket.memory;
  int64_t begin = 0;
  for (at::Tensor& sum : bucket.sums) {
    const at::Tensor part = kept.narrow(0, begin, sum.numel());
    begin += sum.numel();
    // A copy between devices keeps the dtype: a conversion there would take memory of the device, and send more bytes.
    const bool converts = bucket.has_sums || part.scalar_type() != sum.scalar_type();
    if (bucket.has_sums) sum = sum.to(optim::widened(sum.scalar_type()));
    if (converts && part.device() != sum.device() && options_.host_threads > 0) {
      if (!host_adder_) host_adder_.emplace(options_.host_threads);
      const at::Tensor brought = brought_to(sum.device(), part);
      bucket.has_sums ? host_adder_->add(sum, brought) : host_adder_->set(sum, brought);
    } else if (bucket.has_sums) {
      sum.add_(brought_to(sum.device(), part));
    } else {
      sum.copy_(converts ? brought_to(sum.device(), part) : part, /*non_blocking=*/true);
    }
    measure(bucket.has_sums ? sum : part);
  }
  bucket.has_sums = true;
  if (trace::enabled() && !kept.is_cpu()) {  // the span includes the device's work
    c10::impl::VirtualGuardImpl(kept.device().type()).getStream(kept.device()).synchronize();
  }
}

// Completes the oldest bucket in flight; memory of the pool returns to the pool.
void GradientSums::finish_oldest() {
  const size_t b = in_flight_.front();
  in_flight_.pop_front();
  Bucket& bucket = buckets_[b];
  bucket.kept.valid() ? bucket.kept.get() : add_to_sums(b);
  if (!bucket.is_of_pool) {
    bucket.gradients.reset();
    return;
  }
  const auto num_elements = static_cast<int64_t>(bucket.gradients.storage().nbytes() / bucket.gradients.itemsize());
  const at::Tensor memory = bucket.gradients.as_strided({num_elements}, {1}, 0);
  const auto larger =
      std::ranges::find_if(pool_, [&](const at::Tensor& other) { return other.nbytes() >= memory.nbytes(); });
  pool_.insert(larger, memory);
  if (pool_.size() > kPooledBuckets) pool_.erase(pool_.begin());
  bucket.gradients.reset();
}

const std::vector<at::Tensor>& GradientSums::of(size_t b) const {
  static const std::vector<at::Tensor> none;
  return buckets_[b].has_sums ? buckets_[b].sums : none;
}

void GradientSums::make_zero(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.sums = bucket.memory;
  for (const at::Tensor& sum : bucket.sums) sum.zero_();
  bucket.has_sums = true;
}

void GradientSums::widen(size_t b) {
  for (at::Tensor& sum : buckets_[b].sums) sum = sum.to(optim::widened(sum.scalar_type()));
}

std::vector<at::Tensor> GradientSums::take(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.has_sums = false;
  const bool is_widened = !bucket.sums.front().is_same(bucket.memory.front());
  if (is_widened) return std::move(bucket.sums);
  bucket.memory = bucket.spare.empty() ? options_.make_sums(b) : std::move(bucket.spare);
  bucket.spare.clear();
  return std::move(bucket.sums);
}

void GradientSums::give_back(size_t b, std::vector<at::Tensor> sums) {
  const bool is_widened = sums.front().scalar_type() != buckets_[b].memory.front().scalar_type();
  if (!is_widened) buckets_[b].spare = std::move(sums);
}

int64_t GradientSums::pool_bytes(const std::vector<int64_t>& bucket_bytes) {
  std::multiset<int64_t> pool;
  std::deque<int64_t> in_flight;
  const auto finish_oldest_one = [&] {
    pool.insert(in_flight.front());
    in_flight.pop_front();
    if (pool.size() > kPooledBuckets) pool.erase(pool.begin());
  };
  for (int step = 0; step < 3; ++step) {
    for (const int64_t bytes : bucket_bytes) {
      if (pool.lower_bound(bytes) == pool.end() && in_flight.size() >= kPooledBuckets) finish_oldest_one();
      const auto fits = pool.lower_bound(bytes);
      if (fits == pool.end() && !pool.empty()) pool.erase(pool.begin());
      in_flight.push_back(fits == pool.end() ? bytes : pool.extract(fits).value());
    }
    while (!in_flight.empty()) finish_oldest_one();
  }
  return std::accumulate(pool.begin(), pool.end(), int64_t{0});
}

void GradientSums::clear() {
  for (Bucket& bucket : buckets_) {
    bucket.has_sums = false;
    std::ranges::fill(bucket.used, 0.0);
  }
}

}  // namespace fulgur
