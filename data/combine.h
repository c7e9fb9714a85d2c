#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/data/dataset.h"

namespace fulgur {

// Datasets that are made of others. None reads a sample before it is asked for, unless that is said.
using DatasetPtr = std::shared_ptr<const Dataset>;

// Each sample as `change` returns it: for augmentation, for example. Several threads may call `change` at once.
//   auto flipped = map_samples(photos, [](const Batch& sample, Random& random) {
//     return random.chance(0.5) ? sample.with("image", sample["image"].flip(-1)) : sample;
//   });
DatasetPtr map_samples(DatasetPtr dataset, std::function<Batch(const Batch& sample, Random& random)> change);

// The samples at `indices`, in this order. Throws UsageError for an index that the dataset does not have.
DatasetPtr subset(DatasetPtr dataset, std::vector<int64_t> indices);

// The samples that `keeps` accepts: reads all of them once, now. Samples that draw random numbers do so as in epoch 0.
DatasetPtr filter_samples(DatasetPtr dataset, const std::function<bool(const Batch& sample)>& keeps);

// Shuffles by `seed` and cuts into parts of the given fractions, which add up to 1; sizes are rounded so that every
// sample is in one part. Throws UsageError if they do not add up, or if a part would have no sample.
//   const auto parts = split(photos, {0.8, 0.2}, /*seed=*/1);
std::vector<DatasetPtr> split(const DatasetPtr& dataset, const std::vector<double>& fractions, uint64_t seed);

// All samples of the first dataset, then of the second, and so on.
DatasetPtr concatenate(std::vector<DatasetPtr> datasets);

// `size` samples of several datasets, in proportion to their weights. Each dataset is read in order, and again from its
// start where it has too few; after each sample the proportions are as close to the weights as they can be. A
// DataLoader that shuffles mixes them further. Throws UsageError for a weight that is negative or not finite, for
// weights that are all zero, and for an empty dataset that has one.
// Source: the blending of datasets of Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053.
DatasetPtr mix(std::vector<std::pair<DatasetPtr, double>> weighted, int64_t size);

// Keeps samples that were read once, up to `max_bytes` of them. Random numbers of a sample are drawn when it is first
// read: put augmentation over the cache, in map_samples, where it must not change the kept tensors in place.
DatasetPtr cache_in_memory(DatasetPtr dataset, int64_t max_bytes = int64_t{1} << 62);

// Keeps samples that were read once as files in `folder`, for later runs and other processes too; writing one takes a
// sync of the disk. Random numbers as in cache_in_memory. Throws CheckpointError if the folder keeps samples of a
// dataset of another name, size or digest.
DatasetPtr cache_on_disk(DatasetPtr dataset, std::filesystem::path folder);

}  // namespace fulgur
