#include "strategies/optimizer_shard.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace fulgur {
namespace {

using optim::ElementWiseOptimizer;

constexpr std::string_view kMaster = "master";

// Calls `visit(name, tensor)` for each tensor of a state, made or not.
template <class State, class Visit>
void for_each_tensor(const ElementWiseOptimizer& optimizer, at::ScalarType dtype, State& state, const Visit& visit) {
  for (const auto& field : optimizer.state_fields()) visit(field.name, state.tensors[field.slot]);
  if (optim::is_16_bit(dtype)) visit(kMaster, state.master);
}

// The elements of a tensor in the order of its memory.
at::Tensor in_memory_order(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

}  // namespace

std::vector<Piece> pieces_in(const FlatParameters::Bucket& bucket, ElementRange range) {
  std::vector<Piece> pieces;
  for (size_t s = 0; s < bucket.slots.size(); ++s) {
    const FlatParameters::Slot& slot = bucket.slots[s];
    const int64_t begin = std::max(slot.begin, range.begin);
    const int64_t end = std::min(slot.begin + slot.num_elements, range.end);
    if (begin < end) pieces.push_back({s, begin - slot.begin, end - begin, begin - range.begin});
  }
  return pieces;
}

OptimizerShard::OptimizerShard(const FlatParameters& parameters, const Optimizers& optimizers, int64_t rank,
                               int64_t world_size)
    : parameters_(parameters), optimizers_(optimizers), rank_(rank), world_size_(world_size) {
  for (const auto& optimizer : optimizers) {
    if (dynamic_cast<const ElementWiseOptimizer*>(optimizer.get()) != nullptr) continue;
    throw UsageError(
        fmt::format("{} needs whole tensors{}, but here each rank has a part of them; use an element-wise optimizer "
                    "(AdamW, Adam, SGD, Adagrad, RMSprop, Lion) or strategy 'ddp'",
                    optimizer->name(), optimizer->needs_closure() ? " and the loss" : ""));
  }
  for (size_t b = 0; b < parameters.buckets().size(); ++b) {
    const auto& bucket = parameters.buckets()[b];
    Part& part = parts_.emplace_back();
    part.pieces = pieces_in(bucket, range(b));
    for (const Piece& piece : part.pieces) {
      part.tensors.push_back(bucket.flat.narrow(0, range(b).begin + piece.offset, piece.num_elements));
    }
    part.states.resize(part.pieces.size());
  }
}

ElementRange OptimizerShard::range(size_t bucket) const {
  return rank_range(parameters_.buckets()[bucket].flat.numel(), rank_, world_size_);
}

ElementWiseOptimizer& OptimizerShard::optimizer_of(size_t bucket) const {
  return static_cast<ElementWiseOptimizer&>(optimizers_[parameters_.buckets()[bucket].optimizer]);
}

void OptimizerShard::update(size_t b, const at::Tensor& gradient, const std::vector<double>& used,
                            const GradientTransform& transform) {
  Part& part = parts_[b];
  for (size_t i = 0; i < part.pieces.size(); ++i) {
    const Piece& piece = part.pieces[i];
    part.tensors[i].mutable_grad() =
        used[piece.slot] > 0 ? gradient.narrow(0, piece.offset, piece.num_elements) : at::Tensor();
  }
  ElementWiseOptimizer& optimizer = optimizer_of(b);
  optimizer.update(optimizer.groups()[parameters_.buckets()[b].group], part.tensors, part.states, transform);
  for (const at::Tensor& tensor : part.tensors) tensor.mutable_grad().reset();
}

OptimizerShard::ParameterState OptimizerShard::gather(size_t b, size_t slot, Collective& group) const {
  const c10::NoGradGuard no_grad;
  const Part& part = parts_[b];
  const at::Tensor& param = parameters_.buckets()[b].slots[slot].param;
  ElementWiseOptimizer::State whole;
  const at::Tensor num_updates = at::zeros({1}, at::TensorOptions(at::kLong).device(param.device()));
  for (size_t i = 0; i < part.pieces.size(); ++i) {
    if (part.pieces[i].slot == slot) num_updates.fill_(part.states[i].num_updates);
  }
  group.all_reduce(num_updates, ReduceOp::max).wait();
  ParameterState gathered{.num_updates = num_updates.item<int64_t>()};
  if (gathered.num_updates == 0) return gathered;
  const at::ScalarType dtype = optim::is_16_bit(param.scalar_type()) ? at::kFloat : param.scalar_type();
  for_each_tensor(optimizer_of(b), param.scalar_type(), whole, [&](std::string_view name, const at::Tensor&) {
    const at::Tensor all = at::zeros({param.numel()}, param.options().dtype(dtype).requires_grad(false));
    for (size_t i = 0; i < part.pieces.size(); ++i) {
      const Piece& piece = part.pieces[i];
      if (piece.slot != slot) continue;
      for_each_tensor(optimizer_of(b), param.scalar_type(), part.states[i],
                      [&](std::string_view own_name, const at::Tensor& own) {
                        if (own_name == name) all.narrow(0, piece.begin, piece.num_elements).copy_(own);
                      });
    }
    group.all_reduce(all).wait();  // to every element one rank adds something
    gathered.tensors.emplace(name, all.as_strided(param.sizes(), param.strides()));
  });
  return gathered;
}

void OptimizerShard::set(size_t b, size_t slot, const ParameterState& state) {
  const c10::NoGradGuard no_grad;
  Part& part = parts_[b];
  const at::Tensor& param = parameters_.buckets()[b].slots[slot].param;
  for (size_t i = 0; i < part.pieces.size(); ++i) {
    const Piece& piece = part.pieces[i];
    if (piece.slot != slot) continue;
    part.states[i] = {};
    part.states[i].num_updates = state.num_updates;
    if (state.num_updates == 0) continue;
    for_each_tensor(optimizer_of(b), param.scalar_type(), part.states[i],
                    [&](std::string_view name, at::Tensor& tensor) {
                      const at::Tensor& whole = state.tensors.find(name)->second;
                      tensor = in_memory_order(whole).narrow(0, piece.begin, piece.num_elements).clone();
                    });
  }
}

OptimizerShard::States OptimizerShard::gather_all(Collective& group) const {
  States states;
  for (size_t b = 0; b < parts_.size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) states[slots[s].param.unsafeGetTensorImpl()] = gather(b, s, group);
  }
  return states;
}

void OptimizerShard::set_all(const States& states) {
  for (size_t b = 0; b < parts_.size(); ++b) {
    const auto& slots = parameters_.buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      const auto state = states.find(slots[s].param.unsafeGetTensorImpl());
      if (state != states.end()) set(b, s, state->second);
    }
  }
}

int64_t OptimizerShard::num_state_bytes() const {
  int64_t num_bytes = 0;
  for (size_t b = 0; b < parts_.size(); ++b) {
    for (const auto& state : parts_[b].states) {
      for_each_tensor(optimizer_of(b), at::kHalf, state, [&](std::string_view, const at::Tensor& tensor) {
        if (tensor.defined()) num_bytes += static_cast<int64_t>(tensor.nbytes());
      });
    }
  }
  return num_bytes;
}

}  // namespace fulgur
