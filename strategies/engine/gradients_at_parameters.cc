#include "fulgur/strategies/engine/gradients_at_parameters.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "fulgur/base/error.h"
#include "fulgur/base/huge_pages.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/core/module.h"
#include "fulgur/optim/gradient_divisor.h"
#include "fulgur/strategies/engine/optimizer_shard.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

namespace fulgur {

// Replicas have their backward in threads of their own, which open no scope.
void GradientsAtParameters::add_memory() {
  const bool is_used = context_.alone() && context_.device().is_cpu() && context_.setup.devices.size() == 1;
  if (!is_used) return;
  std::vector<GradientMemory::Request> requests;
  const auto& buckets = context_.parameters.buckets();
  for (; num_buckets_ < buckets.size(); ++num_buckets_) {
    const at::Tensor& flat = buckets[num_buckets_].flat;
    for (const FlatParameters::Slot& slot : buckets[num_buckets_].slots) {
      if (slot.num_elements * flat.element_size() < GradientMemory::kLeastBytes) continue;
      requests.push_back({flat.scalar_type(), slot.num_elements, slot.num_elements});
    }
  }
  memory_.add(requests, [](int64_t num_bytes) { return in_huge_pages(at::empty({num_bytes}, at::kByte)); });
}

void GradientsAtParameters::check_dense(size_t optimizer) const {
  for (const at::Tensor& param : context_.optimizers[optimizer].params()) {
    if (!param.grad().defined() || param.grad().layout() == at::kStrided) continue;
    throw SetupError(
        fmt::format("{}: a gradient is sparse, which is neither measured nor clipped; give the embedding that it comes "
                    "from sparse = false",
                    context_.optimizers[optimizer].name()));
  }
}

at::Tensor GradientsAtParameters::norm(size_t optimizer) {
  check_dense(optimizer);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& param : context_.optimizers[optimizer].params()) {
    if (param.grad().defined()) gradients.push_back(param.grad());
  }
  return joint_norm(gradients).to(context_.device());
}

void GradientsAtParameters::show(size_t optimizer) { optim::widen_gradients(context_.optimizers[optimizer].params()); }

void GradientsAtParameters::update(size_t optimizer, const GradientTransform& transform,
                                   const std::vector<double>& /*next_lr*/, bool /*late*/) {
  if (transform.clip_value) check_dense(optimizer);
  const bool has_masters = look_for_lost_writes(optimizer);
  context_.optimizers[optimizer].step(transform);
  if (has_masters) versions_.remember(context_.parameters);
}

bool GradientsAtParameters::look_for_lost_writes(size_t optimizer) {
  bool has_masters = false;
  if (!context_.optimizers[optimizer].is_element_wise()) return has_masters;
  for (size_t b = 0; b < context_.parameters.buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = context_.parameters.buckets()[b];
    if (bucket.optimizer != optimizer || !optim::is_16_bit(bucket.flat.scalar_type())) continue;
    has_masters = true;
    if (const std::string* written = versions_.written(context_.parameters, b)) versions_.warn_of_lost_write(*written);
  }
  return has_masters;
}

std::vector<ExactValues> GradientsAtParameters::exact_values(size_t b, ElementRange within) const {
  const auto& bucket = context_.parameters.buckets()[b];
  if (!optim::is_16_bit(bucket.flat.scalar_type())) return {};
  Optimizer& optimizer = context_.optimizers[bucket.optimizer];
  std::unordered_map<const c10::TensorImpl*, size_t> indices;
  const std::vector<at::Tensor>& params = optimizer.groups()[bucket.group].params;
  for (size_t i = 0; i < params.size(); ++i) indices[params[i].unsafeGetTensorImpl()] = i;
  std::vector<ExactValues> exact;
  for (const Piece& piece : pieces_in(bucket, within)) {
    const size_t index = indices.at(bucket.slots[piece.slot].param.unsafeGetTensorImpl());
    const ParameterState state = optimizer.parameter_state(bucket.group, index);
    const auto master = state.tensors.find("master");
    if (master == state.tensors.end()) continue;
    const at::Tensor in_order = master->second.as_strided({master->second.numel()}, {1});
    exact.push_back({within.begin + piece.offset, in_order.narrow(0, piece.begin, piece.num_elements)});
  }
  return exact;
}

// Every rank has the whole state, and writes its range of every bucket. A parameter outside of buckets has no state.
void GradientsAtParameters::save(StrategyState& state) {
  std::unordered_map<const c10::TensorImpl*, ElementRange> mine;  // this rank's range of each parameter
  for (const auto& bucket : context_.parameters.buckets()) {
    const World& world = context_.world();
    const ElementRange range = rank_range(bucket.flat.numel(), world.rank(), world.world_size());
    for (const Piece& piece : pieces_in(bucket, range)) {
      mine[bucket.slots[piece.slot].param.unsafeGetTensorImpl()] = {piece.begin, piece.begin + piece.num_elements};
    }
  }
  for (const Trained& trained : trained_params(context_.module, context_.optimizers)) {
    const ParameterState whole = trained.optimizer->parameter_state(trained.group, trained.index);
    save_num_updates(state.shared, trained, whole.num_updates);
    const auto range = mine.find(trained.param.unsafeGetTensorImpl());
    if (whole.num_updates == 0 || range == mine.end()) continue;
    const auto [begin, end] = range->second;
    state.ranges.push_back({trained.name, begin, end, part_of(whole, begin, end - begin)});
  }
}

void GradientsAtParameters::load(const State& shared, const ReadRange& read, bool /*late*/) {
  for (const Trained& trained : trained_params(context_.module, context_.optimizers)) {
    trained.optimizer->load_parameter_state(trained.group, trained.index, read_whole(trained, shared, read));
  }
}

}  // namespace fulgur
