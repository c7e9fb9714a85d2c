#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_buckets.h"
#include "fulgur/strategies/engine/gradient_memory.h"

namespace fulgur {

// Buckets of gradients that every rank has whole: after finish() the gradient of a parameter is a view of its bucket,
// which stays until the next backward writes there.
//   On a CPU autograd makes the gradient of a large parameter, which has a bucket to itself, in memory() if a scope is
// open; the gradient then is the bucket, without a copy, until it is dropped.
//   On a CPU a message of the ranks may go with the last bucket, in one all_reduce: if what travels has 32 bits or more
// and belongs to one optimizer.
// Ownership: borrows parameters and the collective. Threading: the backward and the training thread, never at once.
class GradientViews final : public GradientBuckets {
 public:
  // `message_size`: the number of elements that a message has besides the marks of parameters.
  GradientViews(const FlatParameters& parameters, Collective& data, const ReduceOptions& options, size_t message_size);

  void append() override;
  void put(size_t bucket, size_t slot, bool goes_soon) override;
  void put_zero(size_t bucket, size_t slot) override;
  void launch(size_t bucket) override;
  void finish(const std::vector<std::span<const double>>& used) override;

  const GradientMemory& memory() const { return memory_; }

  bool takes_message() const { return message_room_ > 0; }
  at::Tensor message(int64_t length);  // memory for a message, to be written before the last bucket is launched
  void wait_for_message() { buckets_.back().work.wait(); }

 private:
  struct Bucket {
    // What goes to other ranks, laid out as the parameters' bucket, and the sums, of which parameters have views. They
    // have the same memory, made for the first reduction, unless ReduceOptions::wire is set.
    at::Tensor sent{}, gradients{};
    bool is_of_memory = false;          // they are in memory(), from the first gradient to the end of the reduction
    at::Tensor own{};                   // for `sent` at other times
    std::vector<at::Tensor> arrived{};  // by slot: gradients that are not in the bucket yet, on a GPU
    bool is_launched = false;
    Work work{};
  };
  void add_memory(size_t first_bucket);
  bool may_be_made_by_autograd(size_t bucket) const;
  bool becomes_bucket(size_t bucket, const at::Tensor& gradient) const;
  void make_bucket_of(size_t bucket, const at::Tensor& gradient);
  int64_t sent_elements(size_t bucket) const;
  const at::Tensor& memory_of(size_t bucket);

  const FlatParameters& parameters_;
  Collective& data_;
  const bool rank_order_;
  const std::optional<c10::ScalarType> wire_;
  const size_t message_size_;
  std::vector<Bucket> buckets_;
  int64_t message_room_ = 0;  // elements after the last bucket's gradients, and at the end of each region of memory()
  GradientMemory memory_{};
};

}  // namespace fulgur
