#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "fulgur/core/module_fwd.h"
#include "fulgur/core/optimizer.h"

namespace fulgur {

struct BucketOptions {
  int64_t first_bucket_bytes = 1 << 20;  // cap until one bucket is full: small, so that reducing starts early
  int64_t bucket_cap_bytes = 25 << 20;   // cap of all other buckets; a larger parameter has a bucket to itself
  int64_t large_bytes = INT64_MAX;       // a parameter of at least this size has a bucket to itself, too
  int64_t world_size = 1;                // a bucket's length is a multiple of world_size * 64 elements
  int64_t slot_alignment_bytes = 64;     // a parameter begins at a multiple of this

  // Makes a bucket's memory, of zeros; null: ordinary memory.
  std::function<at::Tensor(int64_t num_elements, const at::TensorOptions& options)> allocate{};
};

// The trainable parameters of a module in a few contiguous buffers, so that an update, a reduction or a copy is one
// call over much memory. A parameter stays the same tensor object, but its memory is a view of a bucket: code that
// holds a parameter sees every update, and names, order and state dict do not change.
//   A bucket holds parameters of one optimizer, one group and one dtype, in reverse registration order, which is about
// the order in which backward finishes them. Buckets come in the order in which backward fills them, whatever the
// groups. A tied parameter appears once. A parameter that is frozen stays outside until it is trained; from then on its
// place never changes, also while it is frozen again.
// Buckets are filled one by one: the extra memory meanwhile is that of the largest bucket.
// Ownership: shares the parameters and owns the buckets. Threading: one thread at a time.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054; Li et al. 2020, arXiv:2006.15704.
class FlatParameters {
 public:
  // A parameter's place in its bucket.
  struct Slot {
    std::string name;
    at::Tensor param;
    int64_t begin;  // in elements; aligned by BucketOptions::slot_alignment_bytes
    int64_t num_elements;
  };
  struct Bucket {
    size_t optimizer;        // index
    size_t group;            // index in that optimizer
    at::Tensor flat{};       // 1-dim; padding holds zeros
    int64_t generation = 0;  // the turn in which it was made: 0 in the constructor, then one for each append()
    std::vector<Slot> slots{};
    int64_t num_bytes = 0;  // size of flat
  };

  // The buckets that the constructor would make, without memory (flat is undefined); `dtype` replaces the parameters'
  // dtypes. Throws like the constructor.
  static std::vector<Bucket> plan(const torch::nn::Module& module, const Optimizers& optimizers,
                                  const BucketOptions& options, std::optional<c10::ScalarType> dtype = {});

  // The generations of the parameters' buckets, by name.
  using Generations = std::map<std::string, int64_t>;
  static constexpr int64_t kOutside = -1;  // in no bucket, although it may be trainable

  // Moves the trainable parameters of the optimizers into buckets, and those in `generations`, frozen or not: into the
  // buckets that an earlier FlatParameters of the same module has made, in as many turns. Throws UsageError, before
  // anything is moved, if a parameter is not the module's, is in two optimizers, is complex, or its elements do not lie
  // densely in memory.
  FlatParameters(const torch::nn::Module& module, const Optimizers& optimizers, const BucketOptions& options = {},
                 const Generations& generations = {});

  // Gives every parameter memory of its own again; gradients stay.
  ~FlatParameters();
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;

  const std::vector<Bucket>& buckets() const { return buckets_; }

  // True if a bucket holds the parameter.
  bool contains(const at::Tensor& param) const { return members_.contains(param.unsafeGetTensorImpl()); }

  // False if a parameter was unfrozen for the first time or came with a new group; call append() then.
  bool contain_all_trainable(const Optimizers& optimizers) const;

  // Moves trainable parameters of the optimizers that are in no bucket yet into new buckets after the present ones. The
  // present buckets do not change. Throws like the constructor.
  void append(const torch::nn::Module& module, const Optimizers& optimizers, const BucketOptions& options);

  // Throws c10::Error, with the parameter's name, if a parameter no longer lies in its bucket: a cast and back, or
  // torch::load, gives it memory of its own, which an update would miss.
  void check_in_place() const;

 private:
  template <class Wanted>
  void append_if(const torch::nn::Module& module, const Optimizers& optimizers, const BucketOptions& options,
                 int64_t generation, const Wanted& wanted);

  std::vector<Bucket> buckets_;
  std::unordered_set<const c10::TensorImpl*> members_;  // the parameters in buckets
};

// The memory of a parameter, or of its gradient, in those of its bucket, with the parameter's own strides
// (channels_last).
at::Tensor view_in(const at::Tensor& flat, const FlatParameters::Slot& slot);

}  // namespace fulgur
