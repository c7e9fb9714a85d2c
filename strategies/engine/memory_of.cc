#include "fulgur/strategies/engine/memory_of.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

#include "fulgur/core/module.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/engine/flat_parameters.h"
#include "fulgur/strategies/engine/gradient_sums.h"
#include "fulgur/strategies/engine/optimizer_shard.h"

namespace fulgur {

// Source of the formulas: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
ModelMemory memory_of(const EngineOptions& engine, const Module& module, const Optimizers& optimizers,
                      const MemoryRequest& request) {
  const std::optional<c10::ScalarType> true_dtype = request.precision.true_dtype();
  const int64_t world_size = engine.world ? request.num_devices : 1;
  const int64_t shards = num_shards(engine, world_size, world_size / std::min(request.num_nodes, world_size));
  const bool keeps = engine.keeps_sums(world_size);
  const auto buckets =
      FlatParameters::plan(module, optimizers, engine.buckets_for(world_size, request.device_type), true_dtype);
  const bool sums_wait = keeps && (world_size == 1 || engine.each_micro_batch);
  const bool has_wire = engine.wire && world_size > 1;
  ModelMemory memory;
  std::unordered_set<const c10::TensorImpl*> counted;
  std::vector<int64_t> pooled_bytes;
  int64_t staged_bytes = 0;  // the largest part of a bucket that goes to the host
  for (const FlatParameters::Bucket& bucket : buckets) {
    for (const auto& slot : bucket.slots) counted.insert(slot.param.unsafeGetTensorImpl());
    const c10::ScalarType dtype = true_dtype.value_or(bucket.slots.front().param.scalar_type());
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    const Optimizer& optimizer = optimizers[bucket.optimizer];
    const int64_t num_elements = bucket.num_bytes / element_size / shards;
    const int64_t on_host = OptimizerShard::elements_on_host(num_elements, engine.host_ratio);
    const auto wide_size = static_cast<int64_t>(c10::elementSize(optim::widened(dtype)));
    const bool are_widened = request.accumulates && (sums_wait || world_size == 1);
    const int64_t gradients = (are_widened ? wide_size : element_size) * (engine.delayed ? 2 : 1);
    const int64_t masters = optim::is_16_bit(dtype) && optimizer.is_element_wise() ? 1 : 0;
    const int64_t state = (optimizer.num_state_values().value_or(0) + masters) * std::max<int64_t>(4, element_size);
    memory.parameters += bucket.num_bytes;
    memory.gradients += gradients * num_elements;
    if (request.accumulates && world_size > 1 && !sums_wait) {  // kept at the parameters until the last micro-batch
      memory.gradients += wide_size * bucket.num_bytes / element_size;
    }
    memory.optimizer_state = optimizer.num_state_values() && memory.optimizer_state
                                 ? std::optional(*memory.optimizer_state + state * num_elements)
                                 : std::nullopt;
    memory.copies += element_size * (engine.delayed ? num_elements : on_host);
    memory.on_host += (gradients + state + element_size) * on_host;
    staged_bytes = std::max(staged_bytes, on_host * element_size);
    if (request.averages_weights) {  // among all ranks, also where nothing else is sharded
      const int64_t average = wide_size * (bucket.num_bytes / element_size / world_size);
      memory.copies += average;
      if (engine.host_ratio > 0) memory.on_host += average;
    }
    const bool has_padding = bucket.slots.back().num_elements * element_size != bucket.num_bytes;
    const bool are_converted = request.accumulates && !sums_wait && wide_size != element_size;
    const bool is_a_gradient = bucket.slots.size() == 1 && !has_padding && !are_converted && !has_wire;
    const auto sent_size = has_wire ? static_cast<int64_t>(c10::elementSize(*engine.wire)) : element_size;
    const int64_t sent_bytes = bucket.num_bytes / element_size * sent_size;
    if (!is_a_gradient) pooled_bytes.push_back(sent_bytes);
    if (has_wire && !keeps) memory.buckets += sent_bytes;
  }
  if (engine.has_replicas && request.device_type == c10::kCPU)
    memory.gradients *= request.num_devices;  // in the same memory
  const bool in_host_memory = engine.host_ratio == 1 && request.device_type == c10::kCPU;
  const bool reduces_in_sums = shards == 1 && !has_wire && (engine.host_ratio == 0 || in_host_memory);
  if (keeps && !reduces_in_sums) memory.buckets = GradientSums::pool_bytes(pooled_bytes);
  if (request.accumulates && sums_wait && request.device_type != c10::kCPU && staged_bytes > 0) {
    const auto pinned = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(staged_bytes)));  // as libtorch rounds
    memory.buckets += pinned;  // through which gradients come that are added on the host
    memory.on_host += pinned;
  }
  for (const at::Tensor& param : module.parameters()) {
    if (!counted.insert(param.unsafeGetTensorImpl()).second) continue;
    const auto dtype = true_dtype && param.is_floating_point() ? *true_dtype : param.scalar_type();
    memory.parameters += param.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return memory;
}

}  // namespace fulgur
