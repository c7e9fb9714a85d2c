#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <optional>
#include <span>
#include <vector>

#include "fulgur/distributed/collective.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_buckets.h"
#include "fulgur/strategies/engine/host_adder.h"

namespace fulgur {

// Buckets of gradients whose sums are kept apart from the parameters, in memory from ReduceOptions::make_sums. The
// buckets themselves take memory from a pool, which holds two buckets if gradients come in the order of buckets. Sums
// of further micro-batches are added until clear().
//   With ReduceOptions::wire buckets have that type, and sums that of make_sums.
//   A gradient that fills its bucket alone becomes the bucket, so that the pool does not grow to the largest parameter.
// If a rank keeps the whole of a bucket in one section on the same device, the first gradients are reduced in the
// memory of the sums, without the pool. With one rank, gradients of further micro-batches are added there too, by the
// copy worker if there is one. 16-bit sums are widened to fp32 by the second micro-batch, unless make_sums makes fp32
// tensors.
// Ownership: borrows parameters, collective and copy worker. Threading: the backward and the training thread, never at
// once.
class GradientSums final : public GradientBuckets {
 public:
  static constexpr size_t kPooledBuckets = 2;

  GradientSums(const FlatParameters& parameters, Collective& data, const ReduceOptions& options);
  ~GradientSums() override;
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  void append() override;
  void begin(bool takes_norms);  // `takes_norms`: finish() leaves norms(), too
  void put(size_t bucket, size_t slot, bool goes_soon) override;
  void put_zero(size_t bucket, size_t slot) override;
  void launch(size_t bucket) override;
  void finish(const std::vector<std::span<const double>>& used) override;

  // The sums of a bucket, by section; empty if nothing was reduced since clear().
  const std::vector<at::Tensor>& of(size_t bucket) const;
  void make_zero(size_t bucket);  // sums of a bucket for which nothing was reduced
  void widen(size_t bucket);      // converts 16-bit sums to fp32, until clear()
  void clear();                   // the memory is kept for the next sums

  // The 2-norm of each of the sums, in fp64, computed while backward runs; empty if not computed.
  const std::vector<at::Tensor>& norms(size_t bucket) const { return buckets_[bucket].norms; }
  void forget_norms();  // the sums were written to

  // How many gradients ranks had since clear(), by slot.
  const std::vector<double>& used(size_t bucket) const { return buckets_[bucket].used; }
  void set_used(size_t bucket, size_t slot, bool used) { buckets_[bucket].used[slot] = used ? 1.0 : 0.0; }

  // Releases the memory of a bucket's sums to the caller. The next sums are kept in memory from give_back(), or in new
  // memory.
  std::vector<at::Tensor> take(size_t bucket);
  void give_back(size_t bucket, std::vector<at::Tensor> sums);

  // The bytes that the pool grows to if gradients come in the order of buckets. `bucket_bytes` are the sizes of the
  // buckets that take memory from the pool.
  static int64_t pool_bytes(const std::vector<int64_t>& bucket_bytes);

 private:
  struct Bucket {
    at::Tensor gradients{};  // laid out as the parameters' bucket; undefined between reductions
    Work work{};
    std::vector<at::Tensor> memory{};  // for sums, from make_sums
    std::vector<at::Tensor> spare{};   // from give_back()
    bool is_of_pool = false;           // `gradients` has memory of the pool
    bool is_in_sums = false;           // `gradients` has the memory of `sums`
    bool is_added_to = false;          // `gradients` holds earlier micro-batches; add to them
    bool goes_into_sums = false;       // reduce_scatter writes from `gradients` into `sums`
    std::vector<at::Tensor> sums{};    // `memory`, or fp32 tensors once 16-bit sums were added up
    bool has_sums = false;
    std::vector<at::Tensor> arrived{};  // by slot: gradients that are not in the bucket yet
    std::shared_future<void> kept{};    // ready when the copy worker is done with the bucket
    std::vector<at::Tensor> norms{};    // 2-norm of each of `sums`
    std::vector<double> used{};
  };

  c10::ScalarType wire(size_t bucket) const;
  bool becomes_bucket(size_t bucket, const at::Tensor& gradient) const;
  void make_bucket_of_gradient(size_t bucket);
  void put_into_bucket(size_t bucket, size_t slot, const at::Tensor& grad);
  bool takes_memory_in_flight() const;
  bool copy_worker_fills(size_t bucket) const;
  bool fills_together(size_t bucket) const;
  bool reduces_in_sums(size_t bucket) const;
  bool can_reduce_into_sums(size_t bucket) const;
  void ensure_memory(size_t bucket);
  void begin_in_sums(size_t bucket);
  void add_to_sums(size_t bucket);
  void finish_oldest();

  const FlatParameters& parameters_;
  Collective& data_;
  const ReduceOptions options_;
  std::vector<Bucket> buckets_;
  std::deque<size_t> in_flight_;  // launched buckets whose sums are not kept yet
  std::vector<at::Tensor> pool_;  // free memory, the shortest first
  bool takes_norms_ = false;
  std::optional<HostAdder> host_adder_;  // made by the thread that needs it first
};

}  // namespace fulgur
