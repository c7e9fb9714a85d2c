#include "fulgur/data/epoch_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace fulgur {
namespace {

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
      share_(cut.share_of(std::max<int64_t>(size_ - place, 0))) {}

std::optional<at::Tensor> EpochPlan::next() {
  const int64_t count = cut_.infinite ? cut_.batch_size : std::min(cut_.batch_size, share_ - given_);
  if (size_ == 0 || count <= 0 || (cut_.drop_last && count < cut_.batch_size)) return std::nullopt;
  at::Tensor samples = samples_at(start_ + given_ * cut_.shard.world_size + cut_.shard.rank, count);
  given_ += count;
  return samples;
}

int64_t EpochPlan::place() const {
  const int64_t place = start_ + given_ * cut_.shard.world_size;
  return cut_.infinite ? place : std::min(place, size_);
}

void EpochPlan::load_pass(int64_t pass) {
  if (pass == pass_) return;
  pass_ = pass;
  const int64_t epoch = epoch_ + pass * kEpochsBetweenPasses;
  if (cut_.sampler) {
    samples_ = cut_.sampler->indices(epoch).contiguous();
  } else {
    batches_ = cut_.batch_sampler->batches(epoch);
  }
}

// A finite epoch that has no item for the last place of a rank gives it one of the first, so that all ranks have as
// many.
at::Tensor EpochPlan::samples_at(int64_t place, int64_t count) {
  const auto load = [&](int64_t at) { load_pass(cut_.infinite ? at / size_ : 0); };
  load(place);
  if (!cut_.sampler) return batches_[static_cast<size_t>(place % size_)];
  const int64_t offset = place % size_;
  if (cut_.shard.world_size == 1 && offset + count <= size_) return samples_.narrow(0, offset, count);
  at::Tensor samples = at::empty(count, at::kLong);
  for (int64_t i = 0; i < count; ++i, place += cut_.shard.world_size) {
    load(place);
    samples.data_ptr<int64_t>()[i] = samples_.const_data_ptr<int64_t>()[place % size_];
  }
  return samples;
}

}  // namespace fulgur
