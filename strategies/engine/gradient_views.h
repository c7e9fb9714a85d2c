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

namespace fulgur {

// Buckets of gradients that every rank has whole: after finish() the gradient of a parameter is a view of its bucket,
// which stays until the next backward writes there.
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

  bool takes_message() const { return message_room_ > 0; }
  at::Tensor message(int64_t length);  // memory for a message, to be written before the last bucket is launched
  void wait_for_message() { buckets_.back().work.wait(); }

 private:
  struct Bucket {
    // Both are laid out as the parameters' bucket, and made for the first reduction. They are one tensor unless
    // ReduceOptions::wire is set.
    at::Tensor sent{};
    at::Tensor gradients{};             // sums, of which parameters have views
    std::vector<at::Tensor> arrived{};  // by slot: gradients that are not in the bucket yet, on a GPU
    bool is_launched = false;
    Work work{};
  };
  const at::Tensor& memory_of(size_t bucket);

  const FlatParameters& parameters_;
  Collective& data_;
  const bool rank_order_;
  const std::optional<c10::ScalarType> wire_;
  const size_t message_size_;
  std::vector<Bucket> buckets_;
  int64_t message_room_ = 0;  // elements after the last bucket's gradients
};

}  // namespace fulgur
