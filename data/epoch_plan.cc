#include "fulgur/data/epoch_plan.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

// A sampler of the user's may return another number of items than it promised.
void check_count(int64_t found, int64_t size, std::string_view sampler, std::string_view function) {
  if (found == size) return;
  throw SetupError(
      fmt::format("{}::size() is {}, but {} has returned {}; make them equal", sampler, size, function, found));
}

// A sampler that was made for another dataset may choose samples that this one does not have.
void check_range(const at::Tensor& samples, int64_t num_samples) {
  const std::span chosen(samples.const_data_ptr<int64_t>(), static_cast<size_t>(samples.numel()));
  const auto outside = std::ranges::find_if(chosen, [&](int64_t i) { return i < 0 || i >= num_samples; });
  if (outside == chosen.end()) return;
  throw SetupError(
      fmt::format("the sampler chooses sample {}, but the dataset has {}; make the sampler for as many samples as the "
                  "dataset has, which after a split are fewer",
                  *outside, num_samples));
}

// The hash of a tensor is the seed for that of the next, so that the cuts between batches count, too.
uint64_t hash_of(const std::vector<at::Tensor>& order) {
  uint64_t hash = 0;
  for (const at::Tensor& samples : order) hash = XXH3_64bits_withSeed(samples.const_data_ptr(), samples.nbytes(), hash);
  return hash;
}

// The orders of the later passes of an infinite epoch are those of epochs that no run reaches.
constexpr int64_t kEpochsBetweenPasses = int64_t{1} << 32;

}  // namespace

int64_t EpochCut::share_of(int64_t num_items) const {
  if (!shard.even) return (num_items - shard.rank + shard.world_size - 1) / shard.world_size;
  return drop_last ? num_items / shard.world_size : (num_items + shard.world_size - 1) / shard.world_size;
}

EpochPlan::EpochPlan(const EpochCut& cut, int64_t epoch, int64_t place)
    : cut_(cut),
      epoch_(epoch),
      start_(place),
      size_(cut.num_items()),
      share_(cut.share_of(std::max<int64_t>(size_ - place, 0))) {
  if (size_ > 0) load_pass_of(place);
}

std::optional<PlannedBatch> EpochPlan::next() {
  const int64_t count = cut_.infinite ? cut_.batch_size : std::min(cut_.batch_size, share_ - given_);
  if (size_ == 0 || count <= 0 || (cut_.drop_last && count < cut_.batch_size)) return std::nullopt;
  PlannedBatch batch = batch_at(start_ + given_ * cut_.shard.world_size + cut_.shard.rank, count);
  given_ += count;
  return batch;
}

int64_t EpochPlan::place() const {
  const int64_t place = start_ + given_ * cut_.shard.world_size;
  return cut_.infinite ? place : std::min(place, size_);
}

uint64_t EpochPlan::order_hash(int64_t place) const {
  if (size_ == 0) return 0;
  const int64_t pass = pass_of(place);
  if (pass != hashed_pass_) {
    hash_ = hash_of(pass == pass_ ? order_ : order_of(pass));
    hashed_pass_ = pass;
  }
  return hash_;
}

int64_t EpochPlan::pass_of(int64_t place) const { return cut_.infinite ? place / size_ : 0; }

int64_t EpochPlan::epoch_of(int64_t pass) const { return epoch_ + pass * kEpochsBetweenPasses; }

std::vector<at::Tensor> EpochPlan::order_of(int64_t pass) const {
  std::vector<at::Tensor> order;
  if (cut_.sampler) {
    order.push_back(cut_.sampler->indices(epoch_of(pass)).contiguous());
    check_count(order[0].numel(), size_, "Sampler", "indices()");
  } else {
    order = cut_.batch_sampler->batches(epoch_of(pass));
    check_count(std::ssize(order), size_, "BatchSampler", "batches()");
    for (at::Tensor& batch : order) batch = batch.contiguous();
  }
  for (const at::Tensor& samples : order) check_range(samples, cut_.num_samples);
  return order;
}

void EpochPlan::load_pass_of(int64_t place) {
  const int64_t pass = pass_of(place);
  if (pass == pass_) return;
  order_ = order_of(pass);
  pass_ = pass;
}

// If a finite epoch has no item left for the last place of a rank, that rank gets one of the first items again, so that
// all ranks have equally many.
PlannedBatch EpochPlan::batch_at(int64_t place, int64_t count) {
  load_pass_of(place);
  const int64_t offset = place % size_;
  const auto of_one_pass = [&](const at::Tensor& samples) {
    return PlannedBatch{samples, std::vector(static_cast<size_t>(samples.numel()), epoch_of(pass_))};
  };
  if (!cut_.sampler) return of_one_pass(order_[static_cast<size_t>(offset)]);
  if (cut_.shard.world_size == 1 && offset + count <= size_) return of_one_pass(order_[0].narrow(0, offset, count));
  PlannedBatch batch{.samples = at::empty(count, at::kLong)};
  for (int64_t i = 0; i < count; ++i, place += cut_.shard.world_size) {
    load_pass_of(place);
    batch.samples.data_ptr<int64_t>()[i] = order_[0].const_data_ptr<int64_t>()[place % size_];
    batch.epochs.push_back(epoch_of(pass_));
  }
  return batch;
}

}  // namespace fulgur
