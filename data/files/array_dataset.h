#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/data/dataset.h"
#include "fulgur/data/tensor_dataset.h"

namespace fulgur {

// The named arrays of a .npy file (named after the file: images.npy has "images"), a .npz or a .safetensors file; the
// extension decides. Arrays of .npy and .safetensors are views of the mapped file. Throws UsageError for another
// extension, and what read_npy(), read_npz() and SafetensorsFile throw.
NamedTensors read_arrays(const std::filesystem::path& file);

// Arrays in files, dim 0 counting samples, as Python programs leave them behind. A batch copies the samples in question
// out of the mapped files.
//   auto train = ArrayDataset::make({"images.npy", "labels.npy"});  // samples: {"images": ..., "labels": ...}
class ArrayDataset final : public Dataset {
 public:
  // Throws what read_arrays() throws, UsageError without a file, and std::runtime_error, naming the files, if a name is
  // there twice, an array has no dimension, or arrays differ in dim 0.
  explicit ArrayDataset(const std::vector<std::filesystem::path>& files);
  static std::shared_ptr<ArrayDataset> make(const std::vector<std::filesystem::path>& files);

  int64_t size() const override { return samples_->size(); }
  Batch get(int64_t index, Random& random) const override { return samples_->get(index, random); }
  Batch get_batch(const at::Tensor& indices, std::span<Random> random) const override;
  std::string digest() const override { return digest_; }

  const Batch& samples() const { return samples_->samples(); }  // all of them

 private:
  std::shared_ptr<const TensorDataset> samples_;
  std::string digest_;
};

}  // namespace fulgur
