#include "fulgur/strategies/engine/gradient_reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/trace.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/optim/fused_update.h"

namespace fulgur {
namespace {

using torch::autograd::PostAccumulateGradHook;

constexpr size_t kOwnNumbers = 1;  // numbers that the reducer adds to a message

at::Tensor view_in(const at::Tensor& gradients, const FlatParameters::Slot& slot) {
  return gradients.as_strided(slot.param.sizes(), slot.param.strides(), slot.begin);
}

// The number of elements that a message takes after the last bucket's gradients; 0 if it cannot go there: with
// several optimizers a step of one would send most buckets for nothing, and 16-bit elements do not hold the message's
// numbers.
int64_t room_for_message(const FlatParameters& parameters, int64_t world_size) {
  const auto& buckets = parameters.buckets();
  if (buckets.empty()) return 0;
  const auto is_of_another = [&](const auto& bucket) { return bucket.optimizer != buckets.front().optimizer; };
  if (std::ranges::any_of(buckets, is_of_another)) return 0;
  const at::Tensor& last = buckets.back().flat;
  if (!last.is_cpu() || optim::is_16_bit(last.scalar_type())) return 0;
  size_t num_numbers = GradientReducer::kMaxExtra + kOwnNumbers;
  for (const auto& bucket : buckets) num_numbers += bucket.slots.size();
  const auto granule = static_cast<size_t>(world_size);
  return static_cast<int64_t>((num_numbers + granule - 1) / granule * granule);
}

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

// A tensor has room for one such hook: an earlier hook is kept inside.
class GradientReducer::Hook final : public PostAccumulateGradHook {
 public:
  Hook(GradientReducer& reducer, size_t bucket, size_t slot, std::unique_ptr<PostAccumulateGradHook> inner)
      : reducer_(reducer), bucket_(bucket), slot_(slot), inner_(std::move(inner)) {}

  void operator()(const torch::autograd::Variable& param) override {
    if (inner_) (*inner_)(param);
    reducer_.on_gradient(bucket_, slot_);
  }
  std::unique_ptr<PostAccumulateGradHook> take_inner() { return std::move(inner_); }

 private:
  GradientReducer& reducer_;
  size_t bucket_, slot_;
  std::unique_ptr<PostAccumulateGradHook> inner_;
};

GradientReducer::GradientReducer(const FlatParameters& parameters, Collective& data, Collective& control,
                                 ReduceOptions options)
    : parameters_(parameters), data_(data), control_(control), options_(options) {
  append();
}

void GradientReducer::append() {
  if (!buckets_.empty() && message_room_ > 0) buckets_.back().gradients.reset();  // another bucket has the message now
  for (size_t b = buckets_.size(); b < parameters_.buckets().size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    Bucket& bucket = buckets_.emplace_back();
    bucket.is_full.assign(slots.size(), false);
    bucket.is_trainable.assign(slots.size(), true);
    bucket.arrived.resize(slots.size());
    bucket.used.assign(slots.size(), 0.0);
    for (size_t s = 0; s < slots.size(); ++s) {
      auto inner = std::move(torch::autograd::impl::post_acc_grad_hooks(slots[s].param));
      torch::autograd::impl::set_post_acc_grad_hooks(slots[s].param,
                                                     std::make_unique<Hook>(*this, b, s, std::move(inner)));
    }
    if (keeps_sums()) bucket.memory = options_.make_sums(b);
    order_.push_back(b);
    places_.push_back(b);
  }
  if (!keeps_sums()) message_room_ = room_for_message(parameters_, data_.world_size());
  learns_order_ = options_.learns_order;
}

GradientReducer::~GradientReducer() {
  for (const size_t b : in_flight_) {
    if (buckets_[b].kept.valid()) buckets_[b].kept.wait();  // the keeper uses this object
  }
  for (const auto& bucket : parameters_.buckets()) {
    for (const auto& slot : bucket.slots) {
      auto* hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(slot.param).get());
      if (hook != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(slot.param, hook->take_inner());
    }
  }
}

void GradientReducer::begin(bool measures) {
  reducing_ = true;
  measures_ = measures;
  next_ = 0;
  filled_.clear();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.is_full.assign(bucket.is_full.size(), false);
    bucket.num_trainable = 0;
    bucket.launched = false;
    bucket.norms.clear();
    for (size_t s = 0; s < bucket.is_full.size(); ++s) {
      const bool is_trainable = parameters_.buckets()[b].slots[s].param.requires_grad();
      learns_order_ = learns_order_ || (options_.learns_order && bucket.is_trainable[s] != is_trainable);
      bucket.is_trainable[s] = is_trainable;
      bucket.num_trainable += is_trainable ? 1 : 0;
    }
    bucket.num_missing = bucket.num_trainable;
  }
}

void GradientReducer::on_gradient(size_t b, size_t slot) {
  if (!reducing_) return;
  TORCH_CHECK(
      buckets_[b].is_trainable[slot], "parameter '", parameters_.buckets()[b].slots[slot].name,
      "' was frozen between the forward and the backward that gives it a gradient; freeze it before the forward");
  TORCH_CHECK(!buckets_[b].is_full[slot], "parameter '", parameters_.buckets()[b].slots[slot].name,
              "' got a gradient twice in the backward of a step, after the first was sent to the other ranks; call "
              "backward() once, or override Module::backward, which turns sending ahead off");
  const at::Tensor& gradient = parameters_.buckets()[b].slots[slot].param.grad();
  becomes_bucket(b, gradient) ? make_bucket_of_gradient(b) : take_gradient(b, slot);
  if (buckets_[b].num_missing == 0) filled_.push_back(static_cast<int64_t>(b));
  launch_filled();
}

// Launches what is filled, in the order of launches, which must not depend on what this rank alone has frozen.
void GradientReducer::launch_filled() {
  for (; next_ < num_early() && buckets_[order_[next_]].num_missing == 0; ++next_) {
    const size_t b = order_[next_];
    const bool is_frozen = buckets_[b].num_trainable == 0;
    if (is_frozen && !sends_every_bucket()) {
      if (options_.learns_order && data_.world_size() > 1) return;  // the message will tell whether it is launched
      continue;
    }
    fill_up(b);
    launch(b);
  }
}

// Whether finish() launches also the buckets that no rank used.
bool GradientReducer::sends_every_bucket() const { return keeps_sums() ? data_.world_size() > 1 : message_room_ > 0; }

// The number of buckets that may start during backward: not the last, if it carries the message.
size_t GradientReducer::num_early() const { return buckets_.size() - (message_room_ > 0 ? 1 : 0); }

// Buckets are launched from now on in the order in which this backward of rank 0 filled them; the buckets that it did
// not fill come last. The contents of buckets stay, and so do the bits of their sums. A bucket that carries
// the message stays the last.
void GradientReducer::learn_order() {
  if (buckets_.empty()) return;
  const auto num_buckets = static_cast<int64_t>(buckets_.size());
  const at::Tensor first = at::full({num_buckets}, -1, at::kLong);
  auto* const begin = first.mutable_data_ptr<int64_t>();
  std::ranges::copy(filled_, begin);
  control_.broadcast(first, /*root=*/0).wait();
  learns_order_ = begin[0] < 0;  // rank 0 had no gradients: the next finish() tries again
  if (learns_order_) return;
  std::vector<size_t> place(buckets_.size(), buckets_.size());
  for (size_t i = 0; i < buckets_.size() && begin[i] >= 0; ++i) place[static_cast<size_t>(begin[i])] = i;
  std::stable_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(num_early()),
                   [&](size_t a, size_t b) { return place[a] < place[b]; });
  for (size_t i = 0; i < order_.size(); ++i) places_[order_[i]] = i;
}

void GradientReducer::take_gradient(size_t b, size_t s) {
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  Bucket& bucket = buckets_[b];
  ensure_memory(b);
  at::Tensor grad = std::exchange(slot.param.mutable_grad(), {});
  if (grad.layout() != at::kStrided) {
    throw SetupError(fmt::format(
        "the gradient of parameter '{}' is sparse; give the embedding that it comes from sparse = false", slot.name));
  }
  const bool goes_soon = places_[b] < next_ + kPooledBuckets;  // if not, do not keep it: gradients would pile up
  keeper_fills(b) && goes_soon ? void(bucket.arrived[s] = std::move(grad)) : put_into_bucket(b, s, grad);
  bucket.is_full[s] = true;
  if (bucket.is_trainable[s]) --bucket.num_missing;
}

// A gradient becomes the bucket if it would fill the bucket alone, and nothing else holds the tensor or its memory: the
// gradient of another parameter may be a view of the same memory.
bool GradientReducer::becomes_bucket(size_t b, const at::Tensor& gradient) const {
  const FlatParameters::Bucket& bucket = parameters_.buckets()[b];
  return keeps_sums() && !reduces_in_sums(b) && fills_bucket_alone(bucket) && !buckets_[b].gradients.defined() &&
         gradient.layout() == at::kStrided && gradient.scalar_type() == bucket.flat.scalar_type() &&
         gradient.strides() == bucket.slots.front().param.strides() && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1;
}

void GradientReducer::make_bucket_of_gradient(size_t b) {
  while (has_to_wait()) finish_oldest();
  Bucket& bucket = buckets_[b];
  const at::Tensor gradient = std::exchange(parameters_.buckets()[b].slots.front().param.mutable_grad(), {});
  bucket.gradients = gradient.as_strided({gradient.numel()}, {1});
  bucket.is_of_pool = bucket.is_in_sums = bucket.is_added_to = false;
  bucket.is_full.front() = true;
  bucket.num_missing = 0;
}

// The keeper may fill the bucket later if no other rank waits for it.
bool GradientReducer::keeper_fills(size_t b) const {
  return options_.keeper != nullptr && buckets_[b].is_in_sums && data_.world_size() == 1;
}

void GradientReducer::put_into_bucket(size_t b, size_t s, const at::Tensor& grad) {
  const c10::NoGradGuard no_grad;
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  const at::Tensor& gradients = buckets_[b].gradients;
  if (buckets_[b].is_added_to) {
    view_in(gradients, slot).add_(grad);
  } else if (grad.is_cpu() && grad.scalar_type() == gradients.scalar_type() && grad.strides() == slot.param.strides()) {
    auto* place = static_cast<std::byte*>(gradients.mutable_data_ptr()) + slot.begin * gradients.itemsize();
    const bool is_there = place == grad.const_data_ptr() || grad.numel() == 0;
    if (!is_there) std::memcpy(place, grad.const_data_ptr(), grad.nbytes());
  } else {
    view_in(gradients, slot).copy_(grad);
  }
}

bool GradientReducer::reduces_in_sums(size_t b) const {
  const std::vector<at::Tensor>& memory = buckets_[b].memory;
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  return memory.size() == 1 && memory.front().numel() == flat.numel() && memory.front().device() == flat.device() &&
         (data_.world_size() == 1 || (!buckets_[b].has_sums && memory.front().scalar_type() == flat.scalar_type()));
}

// True if reduce_scatter can write the sums directly, which saves a copy: first micro-batch, one section, same device
// and dtype.
bool GradientReducer::can_reduce_into_sums(size_t b) const {
  const Bucket& bucket = buckets_[b];
  return !bucket.is_in_sums && !bucket.has_sums && bucket.memory.size() == 1 &&
         bucket.memory.front().device() == bucket.gradients.device() &&
         bucket.memory.front().scalar_type() == bucket.gradients.scalar_type();
}

void GradientReducer::begin_in_sums(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.is_added_to = bucket.has_sums;
  if (!bucket.has_sums) bucket.sums = bucket.memory;
  at::Tensor& sum = bucket.sums.front();
  if (bucket.is_added_to) sum = sum.to(optim::widened(sum.scalar_type()));
  bucket.gradients = sum;
}

void GradientReducer::ensure_memory(size_t b) {
  Bucket& bucket = buckets_[b];
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  if (bucket.gradients.defined()) return;
  if (!keeps_sums()) {
    const bool is_last = b + 1 == buckets_.size();
    bucket.gradients = at::zeros({flat.numel() + (is_last ? message_room_ : 0)}, flat.options());
    return;
  }
  bucket.is_in_sums = reduces_in_sums(b);
  bucket.is_of_pool = !bucket.is_in_sums;
  bucket.is_added_to = false;
  if (bucket.is_in_sums) return begin_in_sums(b);
  const auto find = [&] {
    return std::ranges::find_if(pool_, [&](const at::Tensor& memory) {
      return memory.scalar_type() == flat.scalar_type() && memory.numel() >= flat.numel();
    });
  };
  auto fits = find();
  while (fits == pool_.end() && has_to_wait()) {
    finish_oldest();
    fits = find();
  }
  if (fits == pool_.end()) {
    if (!pool_.empty()) pool_.erase(pool_.begin());
    bucket.gradients = at::zeros_like(flat);
    return;
  }
  bucket.gradients = fits->narrow(0, 0, flat.numel());
  pool_.erase(fits);
  for_each_gap(parameters_.buckets()[b],
               [&](int64_t begin, int64_t end) { bucket.gradients.narrow(0, begin, end - begin).zero_(); });
}

void GradientReducer::launch(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.launched = true;
  bucket.goes_into_sums = options_.shard && can_reduce_into_sums(b);
  if (bucket.goes_into_sums) {
    bucket.work = data_.reduce_scatter(bucket.gradients, ReduceOp::sum, bucket.memory.front());
  } else if (options_.shard) {
    bucket.work = data_.reduce_scatter(bucket.gradients);
  } else if (options_.rank_order) {
    static_cast<void>(data_.reduce_scatter(bucket.gradients));
    bucket.work = data_.all_gather(bucket.gradients);
  } else {
    bucket.work = data_.all_reduce(bucket.gradients);
  }
  if (!keeps_sums()) return;
  if (keeper_fills(b) && in_flight_.size() >= kPooledBuckets) finish_oldest();
  in_flight_.push_back(b);
  bucket.kept = {};
  if (options_.keeper != nullptr && (measures_ || !bucket.is_in_sums || keeper_fills(b))) {
    bucket.kept = options_.keeper->run([this, b] { add_to_sums(b); });
  }
}

void GradientReducer::finish(std::vector<double>& extra) {
  if (!reducing_) begin();
  reducing_ = false;
  // Otherwise a rank that waits for memory of the pool, in the middle of backward, would wait forever.
  if (keeps_sums() && sends_every_bucket()) launch_rest(buckets_.size());
  std::vector<double> used = message_of(extra);
  used = message_room_ > 0 ? exchange_with_last_bucket(used) : exchange(used);
  const auto end_of_extra = used.begin() + static_cast<std::ptrdiff_t>(extra.size());
  extra.assign(used.begin(), end_of_extra);
  const bool a_rank_learns_order = *end_of_extra > 0;
  used.erase(used.begin(), end_of_extra + kOwnNumbers);
  std::vector<std::span<const double>> used_of;  // by bucket and slot
  for (auto next = used.cbegin(); const Bucket& bucket : buckets_) {
    used_of.emplace_back(next, bucket.is_full.size());
    next += static_cast<std::ptrdiff_t>(bucket.is_full.size());
  }
  for (const size_t b : order_) {
    if (buckets_[b].launched || std::ranges::all_of(used_of[b], [](double n) { return n == 0; })) continue;
    fill_up(b);
    launch(b);
  }
  if (keeps_sums()) {
    while (!in_flight_.empty()) finish_oldest();
    add_used(used);
  }
  for (size_t b = 0; !keeps_sums() && b < buckets_.size(); ++b) {
    if (!buckets_[b].launched) continue;
    buckets_[b].work.wait();
    hand_out(b, used_of[b]);
  }
  if (a_rank_learns_order) learn_order();
}

// Runs on the keeper's thread, or on the thread that calls finish_oldest().
void GradientReducer::add_to_sums(size_t b) {
  const c10::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  bucket.work.wait();
  for (size_t s = 0; s < bucket.arrived.size(); ++s) {
    if (const at::Tensor grad = std::exchange(bucket.arrived[s], {}); grad.defined()) put_into_bucket(b, s, grad);
  }
  const auto measure = [&](const at::Tensor& sum) {
    if (measures_) bucket.norms.push_back(joint_norm({sum}));
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
    if (!bucket.has_sums) {
      // A copy between devices keeps the dtype: a conversion there would take memory of the device, and send more
      // bytes.
      const bool converts = part.scalar_type() != sum.scalar_type();
      sum.copy_(converts ? brought_to(sum.device(), part) : part, /*non_blocking=*/true);
      measure(part);
      continue;
    }
    sum = sum.to(optim::widened(sum.scalar_type()));
    sum.add_(brought_to(sum.device(), part));
    measure(sum);
  }
  bucket.has_sums = true;
  if (trace::enabled() && !kept.is_cpu()) {  // the span includes the device's work
    c10::impl::VirtualGuardImpl(kept.device().type()).getStream(kept.device()).synchronize();
  }
}

// Completes the oldest bucket in flight; memory of the pool returns to the pool.
void GradientReducer::finish_oldest() {
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

const std::vector<at::Tensor>& GradientReducer::sums(size_t b) const {
  static const std::vector<at::Tensor> none;
  return buckets_[b].has_sums ? buckets_[b].sums : none;
}

void GradientReducer::widen_sums(size_t b) {
  for (at::Tensor& sum : buckets_[b].sums) sum = sum.to(optim::widened(sum.scalar_type()));
}

std::vector<at::Tensor> GradientReducer::take_sums(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.has_sums = false;
  const bool is_widened = !bucket.sums.front().is_same(bucket.memory.front());
  if (is_widened) return std::move(bucket.sums);
  bucket.memory = bucket.spare.empty() ? options_.make_sums(b) : std::move(bucket.spare);
  bucket.spare.clear();
  return std::move(bucket.sums);
}

void GradientReducer::give_back(size_t b, std::vector<at::Tensor> sums) {
  const bool is_widened = sums.front().scalar_type() != buckets_[b].memory.front().scalar_type();
  if (!is_widened) buckets_[b].spare = std::move(sums);
}

int64_t GradientReducer::pool_bytes(const std::vector<int64_t>& bucket_bytes) {
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

void GradientReducer::add_used(const std::vector<double>& used) {
  auto next = used.begin();
  for (Bucket& bucket : buckets_) {
    for (double& count : bucket.used) count += *next++;
  }
}

// The memory of the sums is kept for the next sums.
void GradientReducer::clear() {
  for (Bucket& bucket : buckets_) {
    bucket.has_sums = false;
    bucket.used.assign(bucket.is_full.size(), 0.0);
  }
}

// `extra`, whether this rank asks for another order of launches, and for each parameter, by bucket and slot, 1 if this
// rank has a gradient for it.
std::vector<double> GradientReducer::message_of(const std::vector<double>& extra) const {
  TORCH_CHECK(extra.size() <= kMaxExtra, "no more than ", kMaxExtra, " numbers go with the gradients");
  std::vector<double> message = extra;
  message.push_back(learns_order_ ? 1.0 : 0.0);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      message.push_back(buckets_[b].is_full[s] || slots[s].param.grad().defined() ? 1.0 : 0.0);
    }
  }
  return message;
}

std::vector<double> GradientReducer::exchange(std::vector<double> message) {
  control_.all_reduce(at::from_blob(message.data(), {static_cast<int64_t>(message.size())}, at::kDouble)).wait();
  return message;
}

// Sends every bucket, because which buckets are used is known only afterwards.
std::vector<double> GradientReducer::exchange_with_last_bucket(const std::vector<double>& message) {
  const size_t last = buckets_.size() - 1;
  launch_rest(last);
  fill_up(last);
  const auto length = static_cast<int64_t>(message.size());
  const at::Tensor room = buckets_[last].gradients.narrow(0, parameters_.buckets()[last].flat.numel(), length);
  room.copy_(at::tensor(message, at::kDouble));
  launch(last);
  buckets_[last].work.wait();
  const at::Tensor sums = room.to(at::kDouble);
  const auto* first = sums.const_data_ptr<double>();
  return {first, first + length};
}

// Launches the first `num_buckets` in the order of launches, except those that are launched already.
void GradientReducer::launch_rest(size_t num_buckets) {
  for (size_t i = 0; i < num_buckets; ++i) {
    const size_t b = order_[i];
    if (buckets_[b].launched) continue;
    fill_up(b);
    launch(b);
  }
}

// Takes the remaining gradients; parameters without a gradient on this rank count as zero.
void GradientReducer::fill_up(size_t b) {
  Bucket& bucket = buckets_[b];
  const auto& parameters = parameters_.buckets()[b];
  ensure_memory(b);
  for (size_t s = 0; s < parameters.slots.size(); ++s) {
    const FlatParameters::Slot& slot = parameters.slots[s];
    if (bucket.is_full[s]) continue;
    if (slot.param.grad().defined()) {
      take_gradient(b, s);
    } else if (!bucket.is_added_to) {
      bucket.gradients.narrow(0, slot.begin, slot.num_elements).zero_();
    }
  }
}

void GradientReducer::hand_out(size_t b, std::span<const double> used) {
  const auto& slots = parameters_.buckets()[b].slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (used[s] > 0) slots[s].param.mutable_grad() = view_in(buckets_[b].gradients, slots[s]);
  }
}

}  // namespace fulgur
