#include "fulgur/strategies/engine/gradient_reducer.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/strategies/engine/packed_marks.h"

namespace fulgur {
namespace {

using torch::autograd::PostAccumulateGradHook;

// Marks that take more, with those of all ranks, are sent only when they have changed: a small all_reduce brings the
// numbers of every rank to every rank.
constexpr int64_t kMostBytesOfMarks = 16 << 10;

constexpr size_t kOwnNumbers = 2;  // numbers that the reducer adds to a message, besides the marks

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
    : parameters_(parameters), data_(data), control_(control), may_learn_order_(options.learns_order) {
  if (options.make_sums) {
    sums_.emplace(parameters, data, options);
  } else {
    views_.emplace(parameters, data, options, kMaxExtra + kOwnNumbers);
  }
  append();
}

GradientBuckets& GradientReducer::contents() { return sums_ ? static_cast<GradientBuckets&>(*sums_) : *views_; }

void GradientReducer::append() {
  contents().append();
  for (size_t b = buckets_.size(); b < parameters_.buckets().size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    Bucket& bucket = buckets_.emplace_back();
    bucket.is_full.assign(slots.size(), false);
    bucket.is_trainable.assign(slots.size(), true);
    for (size_t s = 0; s < slots.size(); ++s) {
      auto inner = std::move(torch::autograd::impl::post_acc_grad_hooks(slots[s].param));
      torch::autograd::impl::set_post_acc_grad_hooks(slots[s].param,
                                                     std::make_unique<Hook>(*this, b, s, std::move(inner)));
    }
    order_.push_back(b);
    places_.push_back(b);
  }
  learns_order_ = may_learn_order_;
}

GradientReducer::~GradientReducer() {
  for (const auto& bucket : parameters_.buckets()) {
    for (const auto& slot : bucket.slots) {
      auto* hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(slot.param).get());
      if (hook != nullptr) torch::autograd::impl::set_post_acc_grad_hooks(slot.param, hook->take_inner());
    }
  }
}

void GradientReducer::begin(bool takes_norms) {
  reducing_ = true;
  if (sums_) sums_->begin(takes_norms);
  next_ = 0;
  filled_.clear();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.is_full.assign(bucket.is_full.size(), false);
    bucket.num_trainable = 0;
    bucket.is_launched = false;
    for (size_t s = 0; s < bucket.is_full.size(); ++s) {
      const bool is_trainable = parameters_.buckets()[b].slots[s].param.requires_grad();
      learns_order_ = learns_order_ || (may_learn_order_ && bucket.is_trainable[s] != is_trainable);
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
  take_gradient(b, slot);
  if (buckets_[b].num_missing == 0) filled_.push_back(static_cast<int64_t>(b));
  launch_filled();
}

// Launches the filled buckets in the order of launches, which must not depend on parameters that only this rank has
// frozen.
void GradientReducer::launch_filled() {
  for (; next_ < num_early() && buckets_[order_[next_]].num_missing == 0; ++next_) {
    const size_t b = order_[next_];
    const bool is_frozen = buckets_[b].num_trainable == 0;
    if (is_frozen && !sends_every_bucket()) {
      if (may_learn_order_ && data_.world_size() > 1) return;  // the message will tell whether it is launched
      continue;
    }
    fill_up(b);
    launch(b);
  }
}

// Whether the message goes with the last bucket, which saves an exchange. It comes too late then to tell which buckets
// no rank has used, so it goes alone as long as there are any.
bool GradientReducer::message_rides_along() const { return views_ && views_->takes_message() && all_were_used_; }

// Whether finish() launches also the buckets that no rank used.
bool GradientReducer::sends_every_bucket() const { return sums_ ? data_.world_size() > 1 : message_rides_along(); }

// The number of buckets that may start during backward: not the last, if it carries the message.
size_t GradientReducer::num_early() const { return buckets_.size() - (message_rides_along() ? 1 : 0); }

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
  const std::ptrdiff_t num_in_any_place = std::ssize(order_) - (views_ && views_->takes_message() ? 1 : 0);
  std::stable_sort(order_.begin(), order_.begin() + num_in_any_place,
                   [&](size_t a, size_t b) { return place[a] < place[b]; });
  for (size_t i = 0; i < order_.size(); ++i) places_[order_[i]] = i;
}

void GradientReducer::take_gradient(size_t b, size_t s) {
  const FlatParameters::Slot& slot = parameters_.buckets()[b].slots[s];
  if (slot.param.grad().layout() != at::kStrided) {
    throw SetupError(fmt::format(
        "the gradient of parameter '{}' is sparse; give the embedding that it comes from sparse = false", slot.name));
  }
  contents().put(b, s, /*goes_soon=*/places_[b] < next_ + GradientSums::kPooledBuckets);
  buckets_[b].is_full[s] = true;
  if (buckets_[b].is_trainable[s]) --buckets_[b].num_missing;
}

void GradientReducer::launch(size_t b) {
  buckets_[b].is_launched = true;
  contents().launch(b);
}

void GradientReducer::finish(std::vector<double>& extra) {
  if (!reducing_) begin();
  reducing_ = false;
  // Every bucket, zeros too: another rank may wait, in the middle of its backward, for the memory of a bucket that it
  // has launched, and it cannot tell before the end what it uses. Gradients that were kept until all ranks have told
  // would take the memory that the pool saves.
  if (sums_ && sends_every_bucket()) launch_rest(buckets_.size());
  const std::vector<bool> marks = used_parameters();
  const std::vector<double> sums = message_rides_along() ? exchange_with_last_bucket(message_of(extra, marks), marks)
                                                         : exchange(message_of(extra, marks), marks);
  const auto end_of_extra = sums.begin() + static_cast<std::ptrdiff_t>(extra.size());
  extra.assign(sums.begin(), end_of_extra);
  const bool a_rank_learns_order = *end_of_extra > 0;
  std::vector<std::span<const double>> used_of;  // by bucket and slot
  for (auto next = used_by_.cbegin(); const Bucket& bucket : buckets_) {
    used_of.emplace_back(next, bucket.is_full.size());
    next += static_cast<std::ptrdiff_t>(bucket.is_full.size());
  }
  all_were_used_ = true;
  for (const size_t b : order_) {
    const bool is_used = std::ranges::any_of(used_of[b], [](double num_ranks) { return num_ranks > 0; });
    all_were_used_ = all_were_used_ && is_used;
    if (buckets_[b].is_launched || !is_used) continue;
    fill_up(b);
    launch(b);
  }
  contents().finish(used_of);
  if (a_rank_learns_order) learn_order();
}

// For each parameter, by bucket and slot, whether this rank has a gradient for it.
std::vector<bool> GradientReducer::used_parameters() const {
  std::vector<bool> used;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      used.push_back(buckets_[b].is_full[s] || slots[s].param.grad().defined());
    }
  }
  return used;
}

// Returns `extra`, followed by two flags: this rank requests a new order of launches; its marks differ from those of
// the last message.
std::vector<double> GradientReducer::message_of(const std::vector<double>& extra,
                                                const std::vector<bool>& marks) const {
  TORCH_CHECK(extra.size() <= kMaxExtra, "no more than ", kMaxExtra, " numbers go with the gradients");
  std::vector<double> message = extra;
  message.push_back(learns_order_ ? 1.0 : 0.0);
  message.push_back(marks == last_marks_ ? 0.0 : 1.0);
  return message;
}

void GradientReducer::add_up(std::vector<double>& numbers) {
  control_.all_reduce(at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kDouble)).wait();
}

// Marks go with the message as long as that is small; otherwise by a message of their own, if those of any rank have
// changed.
std::vector<double> GradientReducer::exchange(std::vector<double> message, const std::vector<bool>& marks) {
  const size_t length = message.size();
  std::vector<double> packed = pack_marks(marks, control_.world_size());
  const auto num_bytes = static_cast<int64_t>((length + packed.size()) * sizeof(double));
  const bool is_small = num_bytes * control_.world_size() <= kMostBytesOfMarks;
  if (is_small) message.insert(message.end(), packed.begin(), packed.end());
  add_up(message);
  if (is_small) {
    packed.assign(message.begin() + static_cast<std::ptrdiff_t>(length), message.end());
  } else {
    const bool have_changed = message.back() > 0;
    if (!have_changed) return message;
    add_up(packed);
  }
  keep_counts(packed, marks, control_.world_size());
  return message;
}

void GradientReducer::keep_counts(std::span<const double> packed, const std::vector<bool>& marks, int64_t world_size) {
  used_by_ = unpack_counts(packed, marks.size(), world_size);
  last_marks_ = marks;
}

// Sends every bucket, because which buckets are used is known only afterwards.
std::vector<double> GradientReducer::exchange_with_last_bucket(std::vector<double> message,
                                                               const std::vector<bool>& marks) {
  const size_t last = buckets_.size() - 1, length = message.size();
  launch_rest(last);
  fill_up(last);
  const std::vector<double> packed = pack_marks(marks, data_.world_size());
  message.insert(message.end(), packed.begin(), packed.end());
  const at::Tensor place = views_->message(static_cast<int64_t>(message.size()));
  place.copy_(at::tensor(message, at::kDouble));
  launch(last);
  views_->wait_for_message();
  const at::Tensor sums = place.to(at::kDouble);
  const std::span all(sums.const_data_ptr<double>(), message.size());
  keep_counts(all.subspan(length), marks, data_.world_size());
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(length)};
}

// Launches the first `num_buckets` in the order of launches, except those that are launched already.
void GradientReducer::launch_rest(size_t num_buckets) {
  for (size_t i = 0; i < num_buckets; ++i) {
    const size_t b = order_[i];
    if (buckets_[b].is_launched) continue;
    fill_up(b);
    launch(b);
  }
}

// Takes the remaining gradients; parameters without a gradient on this rank count as zero.
void GradientReducer::fill_up(size_t b) {
  const auto& slots = parameters_.buckets()[b].slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (buckets_[b].is_full[s]) continue;
    if (slots[s].param.grad().defined()) {
      take_gradient(b, s);
    } else {
      contents().put_zero(b, s);
    }
  }
}

}  // namespace fulgur
