#include "fulgur/data/data_loader.h"

#include <ATen/ops/arange.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fulgur/base/error.h"

namespace fulgur {
namespace {

std::shared_ptr<const Sampler> choose_sampler(const Dataset& dataset, const DataLoaderOptions& options) {
  if (options.sampler) return options.sampler;
  if (options.shuffle) return std::make_shared<RandomSampler>(dataset.size(), options.seed);
  return std::make_shared<SequentialSampler>(dataset.size());
}

at::Tensor part_of(const at::Tensor& indices, const DataShard& shard, int64_t num_samples) {
  if (shard.world_size == 1 || indices.numel() == 0) return indices;
  const at::Tensor places = at::arange(num_samples, at::kLong).mul_(shard.world_size).add_(shard.rank);
  return indices.index_select(0, places.remainder_(indices.numel()));
}

}  // namespace

void DataLoaderOptions::describe(FieldVisitor& visit) {
  visit({.name = "batch_size", .help = "samples in a batch", .min = 1}, &batch_size);
  visit({.name = "shuffle", .help = "read the samples in a new order every epoch"}, &shuffle);
  visit({.name = "seed", .help = "number that decides the orders"}, &seed);
  visit({.name = "drop_last", .help = "leave out a last batch that is shorter"}, &drop_last);
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options)
    : dataset_(std::move(dataset)), batch_size_(options.batch_size), drop_last_(options.drop_last) {
  if (dataset_ == nullptr) throw UsageError("DataLoader: the dataset is a null pointer");
  if (batch_size_ < 1) throw UsageError(fmt::format("DataLoader: batch_size must be at least 1; got {}", batch_size_));
  if (options.shuffle && options.sampler) {
    throw UsageError("DataLoader: shuffle and sampler both say in which order to read; leave one of them out");
  }
  sampler_ = choose_sampler(*dataset_, options);
  if (options.shuffle) seed_ = options.seed;
}

std::shared_ptr<DataLoader> DataLoader::make(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options) {
  return std::make_shared<DataLoader>(std::move(dataset), std::move(options));
}

void DataLoader::begin_epoch(int64_t epoch) {
  indices_ = part_of(sampler_->indices(epoch), shard_, num_samples());
  position_ = 0;
}

std::optional<Batch> DataLoader::next() {
  const int64_t left = indices_.defined() ? std::max<int64_t>(0, indices_.numel() - position_) : 0;
  const int64_t count = std::min(batch_size_, left);
  if (count == 0 || (drop_last_ && count < batch_size_)) return std::nullopt;
  Batch batch = dataset_->get_batch(indices_.narrow(0, position_, count), {});
  position_ += count;
  return batch;
}

std::optional<int64_t> DataLoader::num_batches() const {
  return (num_samples() + (drop_last_ ? 0 : batch_size_ - 1)) / batch_size_;
}

State DataLoader::state() const {
  State state;
  if (seed_) state.set("seed", static_cast<int64_t>(*seed_));
  return state;
}

void DataLoader::load_state(const State& state) {
  const int64_t* seed = state.find<int64_t>("seed");
  if (seed == nullptr || !seed_) return;
  seed_ = static_cast<uint64_t>(*seed);
  sampler_ = std::make_shared<RandomSampler>(dataset_->size(), *seed_);
}

bool DataLoader::set_shard(const DataShard& shard) {
  shard_ = shard;
  return true;
}

int64_t DataLoader::num_samples() const {
  const int64_t size = sampler_->size();
  if (!shard_.even) return (size - shard_.rank + shard_.world_size - 1) / shard_.world_size;
  return drop_last_ ? size / shard_.world_size : (size + shard_.world_size - 1) / shard_.world_size;
}

}  // namespace fulgur
