#include "fulgur/strategies/engine/gradient_views.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/engine/packed_marks.h"

namespace fulgur {
namespace {

// The number of elements that a message takes after the last bucket's gradients; 0 if it cannot go there: with
// several optimizers a step of one would send most buckets for nothing, and 16-bit elements do not hold the message's
// numbers.
int64_t room_for_message(const FlatParameters& parameters, std::optional<c10::ScalarType> wire, int64_t world_size,
                         size_t message_size) {
  const auto& buckets = parameters.buckets();
  if (buckets.empty()) return 0;
  const auto is_of_another = [&](const auto& bucket) { return bucket.optimizer != buckets.front().optimizer; };
  if (std::ranges::any_of(buckets, is_of_another)) return 0;
  const at::Tensor& last = buckets.back().flat;
  if (!last.is_cpu() || optim::is_16_bit(wire.value_or(last.scalar_type()))) return 0;
  size_t num_slots = 0;
  for (const auto& bucket : buckets) num_slots += bucket.slots.size();
  const size_t num_numbers = message_size + num_packed(num_slots, world_size);
  const auto granule = static_cast<size_t>(world_size);
  return static_cast<int64_t>((num_numbers + granule - 1) / granule * granule);
}

}  // namespace

GradientViews::GradientViews(const FlatParameters& parameters, Collective& data, const ReduceOptions& options,
                             size_t message_size)
    : parameters_(parameters),
      data_(data),
      rank_order_(options.rank_order),
      wire_(options.wire),
      message_size_(message_size) {
  append();
}

void GradientViews::append() {
  if (takes_message()) {  // another bucket has the message from now on
    buckets_.back().sent.reset();
    buckets_.back().gradients.reset();
    buckets_.back().own.reset();
  }
  size_t first_new = buckets_.size();
  for (size_t b = first_new; b < parameters_.buckets().size(); ++b) {
    buckets_.emplace_back().arrived.resize(parameters_.buckets()[b].slots.size());
  }
  const int64_t room = room_for_message(parameters_, wire_, data_.world_size(), message_size_);
  if (std::exchange(message_room_, room) != room) {
    memory_ = {};
    first_new = 0;
  }
  add_memory(first_new);
}

// Any of the regions may be that of the last bucket, which has the message.
void GradientViews::add_memory(size_t first_bucket) {
  std::vector<GradientMemory::Request> requests;
  for (size_t b = first_bucket; b < buckets_.size(); ++b) {
    if (!may_be_made_by_autograd(b)) continue;
    const FlatParameters::Bucket& bucket = parameters_.buckets()[b];
    requests.push_back({.dtype = bucket.flat.scalar_type(),
                        .num_elements = bucket.slots.front().num_elements,
                        .region_elements = bucket.flat.numel() + message_room_});
  }
  memory_.add(requests, [&](int64_t num_bytes) { return data_.allocate(num_bytes, at::kByte); });
}

bool GradientViews::may_be_made_by_autograd(size_t b) const {
  const FlatParameters::Bucket& bucket = parameters_.buckets()[b];
  return bucket.flat.is_cpu() && !wire_ && bucket.slots.size() == 1 &&
         bucket.slots.front().num_elements * bucket.flat.element_size() >= GradientMemory::kLeastBytes;
}

// Whether a gradient lies in memory_, and nothing else holds the tensor or its memory: the gradient of another
// parameter may be a view of the same memory.
bool GradientViews::becomes_bucket(size_t b, const at::Tensor& gradient) const {
  if (!may_be_made_by_autograd(b)) return false;
  const FlatParameters::Bucket& bucket = parameters_.buckets()[b];
  return gradient.strides() == bucket.slots.front().param.strides() &&
         gradient.scalar_type() == bucket.flat.scalar_type() && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1 && memory_.region_of(gradient).defined();
}

void GradientViews::make_bucket_of(size_t b, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  bucket.is_of_memory = true;
  bucket.gradients = gradient.as_strided({gradient.numel()}, {1});
  bucket.sent = memory_.region_of(gradient).narrow(0, 0, sent_elements(b));
}

// The length of a bucket on its way, with the message if it has one.
int64_t GradientViews::sent_elements(size_t b) const {
  return parameters_.buckets()[b].flat.numel() + (b + 1 == buckets_.size() ? message_room_ : 0);
}

const at::Tensor& GradientViews::memory_of(size_t b) {
  Bucket& bucket = buckets_[b];
  if (bucket.sent.defined()) return bucket.sent;
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  if (may_be_made_by_autograd(b)) {
    const at::Tensor made = memory_.make(flat.scalar_type(), parameters_.buckets()[b].slots.front().num_elements);
    if (made.defined()) {
      make_bucket_of(b, made);
      return bucket.sent;
    }
  }
  const c10::ScalarType dtype = wire_.value_or(flat.scalar_type());
  if (!bucket.own.defined()) bucket.own = data_.allocate(sent_elements(b), flat.options().dtype(dtype));
  bucket.sent = bucket.own;
  bucket.gradients = dtype == flat.scalar_type() ? bucket.sent : at::empty_like(flat);
  return bucket.sent;
}

// On a GPU gradients wait for the launch of their bucket, if it comes soon: a copy of all takes one launch there.
void GradientViews::put(size_t b, size_t s, bool goes_soon) {
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  at::Tensor grad = std::exchange(slot.param.mutable_grad(), {});
  if (becomes_bucket(b, grad)) return make_bucket_of(b, grad);
  if (goes_soon && !memory_of(b).is_cpu()) {
    buckets_[b].arrived[s] = std::move(grad);
  } else {
    copy_into(memory_of(b), slot, grad);
  }
}

void GradientViews::put_zero(size_t b, size_t s) {
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  buckets_[b].arrived[s].reset();
  memory_of(b).narrow(0, slot.begin, slot.num_elements).zero_();
}

void GradientViews::launch(size_t b) {
  Bucket& bucket = buckets_[b];
  bucket.is_launched = true;
  if (!bucket.sent.is_cpu()) {
    move_into(bucket.sent, parameters_.buckets()[b], bucket.arrived, /*adds=*/false, /*together=*/true);
  }
  bucket.work = reduce_whole(data_, bucket.sent, rank_order_);
}

at::Tensor GradientViews::message(int64_t length) {
  const size_t last = buckets_.size() - 1;
  return memory_of(last).narrow(0, parameters_.buckets()[last].flat.numel(), length);
}

// A parameter that has a gradient on no rank gets none.
void GradientViews::finish(const std::vector<std::span<const double>>& used) {
  const c10::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    if (!std::exchange(bucket.is_launched, false)) continue;
    bucket.work.wait();
    if (bucket.gradients.scalar_type() != bucket.sent.scalar_type()) bucket.gradients.copy_(bucket.sent);
    const auto& slots = parameters_.buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      if (used[b][s] > 0) slots[s].param.mutable_grad() = view_in(bucket.gradients, slots[s]);
    }
    if (std::exchange(bucket.is_of_memory, false)) {  // free for the next gradient when this one is dropped
      bucket.sent.reset();
      bucket.gradients.reset();
    }
  }
}

}  // namespace fulgur
