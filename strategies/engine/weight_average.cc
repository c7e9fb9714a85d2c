#include "fulgur/strategies/engine/weight_average.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "fulgur/base/trace.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

namespace fulgur {
namespace {

constexpr int64_t kExchangedElements = 1 << 16;  // at a time, so that what is in between stays in a cache

void exchange(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor between = at::empty({std::min(a.numel(), kExchangedElements)}, a.options());
  for (int64_t begin = 0; begin < a.numel(); begin += kExchangedElements) {
    const int64_t count = std::min(kExchangedElements, a.numel() - begin);
    const at::Tensor of_a = a.narrow(0, begin, count), of_b = b.narrow(0, begin, count);
    const at::Tensor kept = between.narrow(0, 0, count).copy_(of_a);
    of_a.copy_(of_b);
    of_b.copy_(kept);
  }
}

void move_towards(const at::Tensor& average, const at::Tensor& values, double share) {
  if (average.numel() > 0) at::Tensor(average).lerp_(values.to(average.options()), share);
}

bool is_rounded(const FlatParameters::Bucket& bucket) { return optim::is_16_bit(bucket.flat.scalar_type()); }

}  // namespace

ElementRange WeightAverage::range(size_t bucket) const {
  return groups_.grid().own_of(parameters_.buckets()[bucket].flat.numel());
}

at::Tensor WeightAverage::part(size_t bucket) const { return range(bucket).of(parameters_.buckets()[bucket].flat); }

void WeightAverage::add(double share) {
  const trace::Span span("average weights");
  const c10::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(!is_shown_);
  for (size_t b = 0; b < averages_.size(); ++b) add(b, share);
  take_new_buckets();
}

void WeightAverage::append() {
  if (!averages_.empty() && !is_shown_) take_new_buckets();
}

// The average of parameters that were not trained so far is what they are.
void WeightAverage::take_new_buckets() {
  const c10::NoGradGuard no_grad;
  for (size_t b = averages_.size(); b < parameters_.buckets().size(); ++b) {
    const at::Tensor values = part(b);
    averages_.push_back(
        at::zeros(values.sizes(), values.options().device(device_).dtype(optim::widened(values.scalar_type()))));
    add(b, 1.0);
  }
}

void WeightAverage::add(size_t b, double share) {
  const ElementRange mine = range(b);
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  int64_t begin = mine.begin;
  const auto add_parameters_to = [&](int64_t end) {
    move_towards(averages_[b].narrow(0, begin - mine.begin, end - begin), flat.narrow(0, begin, end - begin), share);
  };
  for (const ExactValues& exact : store_.exact_values(b, mine)) {
    add_parameters_to(exact.begin);
    move_towards(averages_[b].narrow(0, exact.begin - mine.begin, exact.values.numel()), exact.values, share);
    begin = exact.begin + exact.values.numel();
  }
  add_parameters_to(mine.end);
}

void WeightAverage::show() {
  if (is_shown_ || averages_.empty()) return;
  const c10::NoGradGuard no_grad;
  store_.wait();  // an update in progress reads the parameters
  raw_.resize(averages_.size());
  for (size_t b = 0; b < averages_.size(); ++b) {
    const at::Tensor values = part(b);
    if (is_rounded(parameters_.buckets()[b])) {
      raw_[b] = values.clone();
      values.copy_(averages_[b]);
    } else {
      exchange(values, averages_[b]);
    }
  }
  gather();
  is_shown_ = true;
}

void WeightAverage::hide() {
  if (!is_shown_) return;
  const c10::NoGradGuard no_grad;
  for (size_t b = 0; b < averages_.size(); ++b) {
    if (raw_[b].defined()) {
      part(b).copy_(raw_[b]);
    } else {
      exchange(part(b), averages_[b]);
    }
  }
  raw_.clear();
  gather();
  is_shown_ = false;
}

void WeightAverage::gather() {
  std::vector<at::Tensor> flats;
  for (size_t b = 0; b < averages_.size(); ++b) flats.push_back(parameters_.buckets()[b].flat);
  groups_.gather_own(flats);
}

void WeightAverage::add_to(StrategyState& state) const {
  if (!is_shown_) return;
  state.shared.set("averaged", true);
  std::map<std::string, std::pair<size_t, int64_t>> places;  // bucket, and where the parameter begins in it
  for (size_t b = 0; b < averages_.size(); ++b) {
    for (const auto& slot : parameters_.buckets()[b].slots) places[slot.name] = {b, slot.begin};
  }
  for (StateRange& saved : state.ranges) {
    const auto place = places.find(saved.parameter);
    if (place == places.end()) continue;
    const auto [b, begin] = place->second;
    const int64_t offset = begin + saved.begin - range(b).begin;
    const auto of = [&](const at::Tensor& tensor) { return tensor.narrow(0, offset, saved.end - saved.begin); };
    saved.tensors["raw"] = of(raw_[b].defined() ? raw_[b] : averages_[b]);
    if (raw_[b].defined()) saved.tensors["average"] = of(averages_[b]);
  }
}

bool WeightAverage::load(const State& shared, const ReadRange& read, bool keeps) {
  averages_.clear();
  if (shared.find<bool>("averaged") == nullptr) return false;
  const c10::NoGradGuard no_grad;
  for (size_t b = 0; b < parameters_.buckets().size(); ++b) {
    const auto& bucket = parameters_.buckets()[b];
    const at::Tensor values = part(b);
    at::Tensor average = values.to(values.options().device(device_).dtype(optim::widened(values.scalar_type())),
                                   /*non_blocking=*/false, /*copy=*/true);
    for (const Piece& piece : pieces_in(bucket, range(b))) {
      const std::string& name = bucket.slots[piece.slot].name;
      if (saved_num_updates(shared, name) == 0) continue;
      const StateTensors saved = read(name, piece.begin, piece.begin + piece.num_elements);
      const auto raw = saved.find("raw"), exact = saved.find("average"), master = saved.find("master");
      if (raw == saved.end()) continue;
      if (exact != saved.end()) average.narrow(0, piece.offset, piece.num_elements).copy_(exact->second);
      const bool wants_master = master != saved.end() && !is_rounded(bucket);  // the run goes on in a higher precision
      values.narrow(0, piece.offset, piece.num_elements).copy_(wants_master ? master->second : raw->second);
    }
    averages_.push_back(std::move(average));
  }
  gather();
  if (!keeps) averages_.clear();
  return true;
}

}  // namespace fulgur
