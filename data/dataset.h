#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fulgur/core/batch.h"
#include "fulgur/data/random.h"

namespace fulgur {

// A known number of samples, each readable by its index. Derive from it for data that is read or generated sample by
// sample; TensorDataset serves samples that are in memory.
// Threading: the const members may be called by several threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples

  // One sample: tensors without a batch dimension. 0 <= index < size(). Everything random (augmentation, masking) is
  // drawn from `random`, never from torch's global generator, so that a sample is the same for any number of workers
  // and after a resume.
  virtual Batch get(int64_t index, Random& random) const = 0;

  // The samples at `indices` (int64, 1-dim), stacked along a new dim 0; random[i] is the Random of indices[i]. Override
  // it if reading many samples at once is faster than one by one. Throws c10::ValueError, with the name, if samples
  // differ in names or shapes.
  virtual Batch get_batch(const at::Tensor& indices, std::span<Random> random) const;

  // Identifies the data, so that a run does not resume in the middle of other data of the same size: a digest of file
  // names and sizes, for example. Empty: unknown.
  virtual std::string digest() const { return {}; }

  // The options that make a sample of the data, such as the size of pictures: as text, for messages. cache_on_disk
  // compares it; a run may resume with other options. Empty: there are none, or they are unknown.
  virtual std::string sample_options() const { return {}; }

  // The dataset's name in messages; by default the name of its type.
  virtual std::string name() const;
};

// Returns dataset.get(index, random). If that throws, text_of() of the exception names the sample and the dataset.
Batch get_sample(const Dataset& dataset, int64_t index, Random& random);

// Makes a batch of samples: tensors of equal names are stacked along a new dim 0. Throws c10::ValueError, with the
// name, if samples differ in names or shapes.
Batch stack_samples(const std::vector<Batch>& samples);

}  // namespace fulgur
