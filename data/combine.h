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

// Datasets derived from other datasets. They read samples on demand, except where a comment says otherwise.
using DatasetPtr = std::shared_ptr<const Dataset>;

// Passes each sample through `change`, for augmentation, for example. Several threads may call `change` at once. The
// digest cannot cover a function: a run that resumes, or cache_on_disk(), does not notice that `change` is another one.
//   auto flipped = map_samples(photos, [](const Batch& sample, Random& random) {
//     return random.chance(0.5) ? sample.with("image", sample["image"].flip(-1)) : sample;
//   });
DatasetPtr map_samples(DatasetPtr dataset, std::function<Batch(const Batch& sample, Random& random)> change);

// The samples at `indices`, in this order. Throws UsageError for an index that the dataset does not have.
DatasetPtr subset(DatasetPtr dataset, std::vector<int64_t> indices);

// Keeps the samples that `keeps` accepts. Reads every sample once, in this call, with the random numbers of seed 0 and
// epoch 0.
DatasetPtr filter_samples(DatasetPtr dataset, const std::function<bool(const Batch& sample)>& keeps);

// Shuffles by `seed` and cuts into parts of the given fractions, which add up to 1; sizes are rounded, and the last
// part gets the rest, so that every sample is in one part. Throws UsageError if the fractions do not add up to 1, or if
// a part would have no sample.
//   const auto parts = split(photos, {0.8, 0.2}, /*seed=*/1);
std::vector<DatasetPtr> split(const DatasetPtr& dataset, const std::vector<double>& fractions, uint64_t seed);

// All samples of the first dataset, then of the second, and so on.
DatasetPtr concatenate(std::vector<DatasetPtr> datasets);

// Draws `size` samples from several datasets in proportion to their weights. Each dataset is read in order and starts
// over at its end; after each sample the proportions are as close to the weights as possible. A DataLoader that
// shuffles mixes the samples further. Throws UsageError for a weight that is negative or not finite, for weights that
// are all zero, and for an empty dataset with a weight above 0.
// Source: the blending of datasets of Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053.
DatasetPtr mix(std::vector<std::pair<DatasetPtr, double>> weighted, int64_t size);

// Keeps samples in memory after their first read, up to `max_bytes` in total. A sample draws its random numbers at that
// read only: apply augmentation to the cached dataset, by map_samples, and never change the kept tensors in place.
DatasetPtr cache_in_memory(DatasetPtr dataset, int64_t max_bytes = int64_t{1} << 62);

// Keeps samples as files in `folder` after their first read, for later runs and other processes, too; each new file
// costs a sync of the disk. Random numbers are drawn as in cache_in_memory. Throws CheckpointError if the folder holds
// samples of a dataset with another name, size, digest or sample_options(). It cannot know that a function has changed,
// such as that of map_samples or the decoder of a TarDataset: give another folder, or put map_samples over the cache.
DatasetPtr cache_on_disk(DatasetPtr dataset, std::filesystem::path folder);

}  // namespace fulgur
