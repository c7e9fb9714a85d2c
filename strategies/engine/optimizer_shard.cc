#include "fulgur/strategies/engine/optimizer_shard.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/huge_pages.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

namespace fulgur {
namespace {

using optim::ElementWiseOptimizer;

constexpr std::string_view kMaster = "master";
constexpr int64_t kPartAlignment = 64;  // elements

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Calls `visit(name, tensor)` for each tensor of a state, defined or not.
template <class TensorsOfState, class Visit>
void for_each_tensor(const ElementWiseOptimizer& optimizer, at::ScalarType dtype, TensorsOfState& state,
                     const Visit& visit) {
  for (const auto& field : optimizer.state_fields()) visit(field.name, state.tensors[field.slot]);
  if (optim::is_16_bit(dtype)) visit(kMaster, state.master);
}

// Exchanges the memory of two tensors of as many elements, also for all views of them.
void exchange_memory(const at::Tensor& a, const at::Tensor& b) {
  c10::StorageImpl& one = *a.storage().unsafeGetStorageImpl();
  c10::StorageImpl& other = *b.storage().unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(a.scalar_type() == b.scalar_type() && one.nbytes() == other.nbytes() &&
                        a.storage_offset() == 0 && b.storage_offset() == 0);
  at::DataPtr of_one = one.set_data_ptr(at::DataPtr(nullptr, a.device()));
  one.set_data_ptr_noswap(other.set_data_ptr(std::move(of_one)));
}

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

OptimizerShard::OptimizerShard(const FlatParameters& parameters, const Optimizers& optimizers,
                               const ShardOptions& options)
    : parameters_(parameters), optimizers_(optimizers), options_(options) {
  for (const auto& optimizer : optimizers) {
    if (dynamic_cast<const ElementWiseOptimizer*>(optimizer.get()) != nullptr) continue;
    throw UsageError(
        fmt::format("{} needs whole tensors{}, but here they are updated in parts; use an optimizer that derives from "
                    "optim::ElementWiseOptimizer, such as AdamW or SGD, or strategy 'ddp'",
                    optimizer->name(), optimizer->needs_closure() ? " and the loss" : ""));
  }
  append();
}

void OptimizerShard::append() {
  const size_t first = buckets_.size();
  buckets_.resize(parameters_.buckets().size());
  int64_t num_bytes = 0;
  for (size_t b = first; b < buckets_.size(); ++b) {
    cut(b);
    num_bytes += bytes_on_host(b);
  }
  if (num_bytes > 0) {
    const bool on_gpu = !parameters_.buckets()[first].flat.is_cpu();
    arenas_.emplace_back(num_bytes, HostArenaOptions{.pinned = on_gpu, .processes = options_.ranks_on_host});
  }
  for (size_t b = first; b < buckets_.size(); ++b) {
    buckets_[b].arena = num_bytes > 0 ? &arenas_.back() : nullptr;
    make_copies(b);
    make_parts(b);
  }
}

int64_t OptimizerShard::host_bytes() const {
  int64_t num_bytes = 0;
  for (const HostArena& arena : arenas_) num_bytes += arena.num_bytes();
  return num_bytes;
}

ElementRange OptimizerShard::range(size_t bucket) const {
  return rank_range(parameters_.buckets()[bucket].flat.numel(), options_.rank, options_.world_size);
}

// Cuts a range into sections; the section on the host comes first.
void OptimizerShard::cut(size_t b) {
  const ElementRange whole = range(b);
  const int64_t middle = whole.begin + elements_on_host(whole.size(), options_.host_ratio);
  const bool workers_can = options_.copies && parameters_.buckets()[b].flat.is_cpu();
  std::vector<Section>& sections = buckets_[b].sections;
  if (middle > whole.begin)
    sections.push_back({.range = {whole.begin, middle}, .on_host = true, .num_workers = options_.num_workers});
  if (middle < whole.end)
    sections.push_back({.range = {middle, whole.end}, .num_workers = workers_can ? options_.num_workers : 1});
}

int64_t OptimizerShard::elements_on_host(int64_t num_elements, double ratio) {
  const auto wanted = static_cast<int64_t>(std::ceil(ratio * static_cast<double>(num_elements)));
  return std::min(num_elements, round_up(wanted, kPartAlignment));
}

c10::ScalarType OptimizerShard::sum_dtype(size_t b) const {
  const c10::ScalarType dtype = parameters_.buckets()[b].flat.scalar_type();
  return options_.accumulates ? optim::widened(dtype) : dtype;
}

int64_t OptimizerShard::bytes_on_host(size_t b) const {
  const c10::ScalarType dtype = parameters_.buckets()[b].flat.scalar_type();
  const auto num_states = static_cast<int64_t>(optimizer_of(b).state_fields().size());
  int64_t num_bytes = 0;
  for (const Section& section : buckets_[b].sections) {
    if (!section.on_host) continue;
    const bool has_master = optim::is_16_bit(dtype);
    const int64_t size = section.range.size();
    num_bytes += HostArena::bytes_for(size, dtype) + options_.gradient_sums * HostArena::bytes_for(size, sum_dtype(b)) +
                 (num_states + (has_master ? 1 : 0)) * HostArena::bytes_for(size, has_master ? at::kFloat : dtype);
  }
  return num_bytes;
}

void OptimizerShard::copy_parameters() {
  for (size_t b = 0; b < buckets_.size(); ++b) copy_parameters(b);
}

void OptimizerShard::copy_parameters(size_t b) {
  const c10::NoGradGuard no_grad;
  for (const Section& section : buckets_[b].sections) {
    if (section.copy.defined()) section.copy.copy_(section.range.of(parameters_.buckets()[b].flat));
  }
  buckets_[b].has_old_copies = false;
}

void OptimizerShard::make_copies(size_t b) {
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  for (Section& section : buckets_[b].sections) {
    if (section.on_host) {
      section.copy = buckets_[b].arena->take(section.range.size(), flat.scalar_type());
    } else if (options_.copies) {
      section.copy = at::empty({section.range.size()}, flat.options());
    }
    section.is_whole = section.copy.defined() && flat.is_cpu() && section.range.size() == flat.numel();
  }
  copy_parameters(b);
}

void OptimizerShard::make_parts(size_t b) {
  const auto& bucket = parameters_.buckets()[b];
  for (const Section& section : buckets_[b].sections) {
    std::vector<Part>& parts = buckets_[b].parts.emplace_back();
    const int64_t length =
        round_up((section.range.size() + section.num_workers - 1) / section.num_workers, kPartAlignment);
    for (int64_t w = 0; w < section.num_workers; ++w) {
      const int64_t begin = std::min(w * length, section.range.size());
      const int64_t end = std::min(begin + length, section.range.size());
      Part& part = parts.emplace_back(
          Part{begin, pieces_in(bucket, {section.range.begin + begin, section.range.begin + end}), {}, {}, {}});
      for (const Piece& piece : part.pieces) {
        const int64_t offset = begin + piece.offset;  // in the section
        part.params.push_back(bucket.flat.narrow(0, section.range.begin + offset, piece.num_elements));
        if (section.copy.defined()) part.copies.push_back(section.copy.narrow(0, offset, piece.num_elements));
      }
      part.states.resize(part.pieces.size());
      if (section.on_host) make_host_states(b, part);
    }
  }
}

// The memory is not written here: pages are placed near the worker whose first update writes them.
void OptimizerShard::make_host_states(size_t b, Part& part) {
  const c10::ScalarType dtype = parameters_.buckets()[b].flat.scalar_type();
  const c10::ScalarType state_dtype = optim::widened(dtype);
  for (size_t i = 0; i < part.pieces.size(); ++i) {
    for_each_tensor(optimizer_of(b), dtype, part.states[i], [&](std::string_view, at::Tensor& tensor) {
      tensor = buckets_[b].arena->take(part.pieces[i].num_elements, state_dtype);
    });
  }
}

std::vector<at::Tensor> OptimizerShard::make_sums(size_t b) {
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  std::vector<at::Tensor> sums;
  for (const Section& section : buckets_[b].sections) {
    sums.push_back(section.on_host ? buckets_[b].arena->take(section.range.size(), sum_dtype(b))
                                   : at::zeros({section.range.size()}, flat.options().dtype(sum_dtype(b))));
  }
  return sums;
}

ElementWiseOptimizer& OptimizerShard::optimizer_of(size_t bucket) const {
  return static_cast<ElementWiseOptimizer&>(optimizers_[parameters_.buckets()[bucket].optimizer]);
}

template <class Visit>
void OptimizerShard::for_each_part(size_t bucket, const Visit& visit) const {
  for (const auto& parts : buckets_[bucket].parts) {
    for (const Part& part : parts) visit(part);
  }
}

bool OptimizerShard::is_rounded(size_t b) const {
  return optim::is_16_bit(parameters_.buckets()[b].flat.scalar_type());
}

// The tensors that the optimizer gets, by piece. While forward reads the parameters of a whole bucket, the optimizer
// gets their copy. Parameters of 16 bits can be given to it even then: it updates their masters, and leaves the
// parameters as they are.
const std::vector<at::Tensor>& OptimizerShard::what_is_updated(size_t b, const Section& section, const Part& part,
                                                               bool late) const {
  const bool in_place = part.copies.empty() || (section.is_whole && (!late || is_rounded(b)));
  return in_place ? part.params : part.copies;
}

void OptimizerShard::update(size_t b, size_t s, int64_t worker, const Optimizer::Group& group,
                            const at::Tensor& gradient, const std::vector<double>& used,
                            const GradientTransform& transform, const Late* late) {
  Part& part = buckets_[b].parts[s][static_cast<size_t>(worker)];
  const std::vector<at::Tensor>& tensors = what_is_updated(b, buckets_[b].sections[s], part, late != nullptr);
  std::vector<at::Tensor> of_gradient;
  for (size_t i = 0; i < part.pieces.size(); ++i) {
    const Piece& piece = part.pieces[i];
    of_gradient.push_back(gradient.narrow(0, part.begin + piece.offset, piece.num_elements));
    tensors[i].mutable_grad() = used[piece.slot] > 0 ? of_gradient.back() : at::Tensor();
  }
  if (late != nullptr) {
    const ElementWiseOptimizer::Copies copies{
        .tensors = is_rounded(b) ? part.copies : of_gradient, .by = late->predict, .next_lr = late->next_lr};
    optimizer_of(b).update(group, tensors, part.states, transform, &copies);
  } else {
    optimizer_of(b).update(group, tensors, part.states, transform);
  }
  for (const at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
}

void OptimizerShard::begin_late(size_t b) {
  if (buckets_[b].has_old_copies) copy_parameters(b);
}

void OptimizerShard::publish(size_t b) {
  const c10::NoGradGuard no_grad;
  for (const Section& section : buckets_[b].sections) {
    if (section.is_whole) {
      buckets_[b].has_old_copies = true;
    } else if (section.copy.defined()) {
      section.range.of(parameters_.buckets()[b].flat).copy_(section.copy, /*non_blocking=*/true);
    }
  }
}

void OptimizerShard::publish_for_forward(size_t b, const std::vector<at::Tensor>& gradients,
                                         const std::vector<double>& used) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor& flat = parameters_.buckets()[b].flat;
  for (size_t s = 0; s < gradients.size(); ++s) {
    const Section& section = buckets_[b].sections[s];
    const at::Tensor& values = is_rounded(b) ? section.copy : gradients[s];
    if (section.is_whole) {
      exchange_memory(flat, values);
    } else {
      section.range.of(flat).copy_(values, /*non_blocking=*/true);
    }
  }
  for_each_part(b, [&](const Part& part) {
    for (size_t i = 0; i < part.pieces.size(); ++i) {
      if (used[part.pieces[i].slot] == 0) write_exact(part, i);
    }
  });
}

void OptimizerShard::publish_exact(size_t b) const {
  const c10::NoGradGuard no_grad;
  show_exact(b);
  if (!is_rounded(b)) return;
  for_each_part(b, [](const Part& part) {
    for (size_t i = 0; i < part.copies.size(); ++i) {
      at::Tensor(part.copies[i]).copy_(part.states[i].values_of(part.params[i]));
    }
  });
}

void OptimizerShard::show_exact(size_t b) const {
  const c10::NoGradGuard no_grad;
  for_each_part(b, [&](const Part& part) {
    for (size_t i = 0; i < part.pieces.size(); ++i) write_exact(part, i);
  });
}

// Called after a delayed update.
void OptimizerShard::write_exact(const Part& part, size_t i) const {
  const at::Tensor& param = part.params[i];
  const bool is_of_16_bits = optim::is_16_bit(param.scalar_type());
  const at::Tensor& exact = is_of_16_bits ? part.states[i].values_of(param) : part.copies[i];
  if (!exact.is_same(param)) at::Tensor(param).copy_(exact);
}

at::Tensor OptimizerShard::for_forward(size_t b, const std::vector<at::Tensor>& gradients) const {
  std::vector<at::Tensor> by_section;
  for (size_t s = 0; s < gradients.size(); ++s) {
    by_section.push_back(is_rounded(b) ? buckets_[b].sections[s].copy : gradients[s]);
  }
  if (by_section.size() == 1) return by_section.front();
  for (at::Tensor& values : by_section) values = values.cpu();  // a section is on the host
  return at::cat(by_section);
}

void OptimizerShard::set_for_forward(size_t b, const at::Tensor& values,
                                     const std::vector<at::Tensor>& gradients) const {
  for (size_t s = 0; s < gradients.size(); ++s) {
    const Section& section = buckets_[b].sections[s];
    const at::Tensor& target = is_rounded(b) ? section.copy : gradients[s];
    at::Tensor(target).copy_(values.narrow(0, section.range.begin - range(b).begin, section.range.size()));
  }
}

bool OptimizerShard::has_masters(size_t b) const {
  bool found = false;
  for_each_part(b, [&](const Part& part) {
    found |= std::ranges::any_of(part.states, [](const auto& state) { return state.master.defined(); });
  });
  return found;
}

// `saved` may be on another device, and in another precision.
void OptimizerShard::load_piece(size_t b, Part& part, size_t i, const ParameterState& saved) {
  ElementWiseOptimizer::State& own = part.states[i];
  own.num_updates = saved.num_updates;
  if (own.num_updates == 0) return;
  const at::Tensor& of_device = part.copies.empty() ? part.params[i] : part.copies[i];
  const at::ScalarType dtype = of_device.scalar_type();
  for_each_tensor(optimizer_of(b), dtype, own, [&](std::string_view name, at::Tensor& tensor) {
    const bool is_new_master = name == kMaster && !saved.tensors.contains(kMaster);
    const at::Tensor wanted = is_new_master ? part.params[i] : saved.tensor(name);
    if (!tensor.defined()) {
      const auto options = at::TensorOptions(of_device.device()).dtype(optim::widened(dtype));
      tensor = in_huge_pages(at::empty_like(wanted, options));
    }
    tensor.copy_(wanted);
  });
}

std::vector<StateRange> OptimizerShard::state_ranges(size_t b, ElementRange within, const LateTensors& late) const {
  const auto& bucket = parameters_.buckets()[b];
  std::vector<StateRange> ranges;
  for (size_t s = 0; s < buckets_[b].parts.size(); ++s) {
    const Section& section = buckets_[b].sections[s];
    for (const Part& part : buckets_[b].parts[s]) {
      for (size_t i = 0; i < part.pieces.size(); ++i) {
        const Piece& piece = part.pieces[i];
        const ElementWiseOptimizer::State& state = part.states[i];
        const int64_t in_bucket = section.range.begin + part.begin + piece.offset;  // start of the piece
        const int64_t begin = std::max(in_bucket, within.begin);
        const int64_t end = std::min(in_bucket + piece.num_elements, within.end);
        if (begin >= end || state.num_updates == 0) continue;
        const auto own = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin - in_bucket, end - begin); };
        StateRange& range = ranges.emplace_back();
        range.parameter = bucket.slots[piece.slot].name;
        range.begin = piece.begin + begin - in_bucket;
        range.end = range.begin + end - begin;
        for_each_tensor(optimizer_of(b), bucket.flat.scalar_type(), state,
                        [&](std::string_view name, const auto& t) { range.tensors.emplace(name, own(t)); });
        for (const auto& [name, values] : late) {
          range.tensors.emplace(name, values.narrow(0, begin - this->range(b).begin, end - begin));
        }
      }
    }
  }
  return ranges;
}

std::vector<ExactValues> OptimizerShard::exact_values(size_t b, ElementRange within, bool late) const {
  const bool on_device = !parameters_.buckets()[b].flat.is_cpu();
  std::vector<ExactValues> exact;
  for (size_t s = 0; s < buckets_[b].parts.size(); ++s) {
    const Section& section = buckets_[b].sections[s];
    for (const Part& part : buckets_[b].parts[s]) {
      for (size_t i = 0; i < part.pieces.size(); ++i) {
        const bool has_master = part.states[i].num_updates > 0 && part.states[i].master.defined();
        const bool has_copy = !part.copies.empty() && (late || (on_device && section.on_host));
        if (!has_master && !has_copy) continue;
        const at::Tensor& values = has_master ? part.states[i].master : what_is_updated(b, section, part, late)[i];
        const int64_t in_bucket = section.range.begin + part.begin + part.pieces[i].offset;
        const int64_t begin = std::max(in_bucket, within.begin);
        const int64_t end = std::min(in_bucket + part.pieces[i].num_elements, within.end);
        if (begin < end) exact.push_back({begin, values.narrow(0, begin - in_bucket, end - begin)});
      }
    }
  }
  return exact;
}

std::vector<int64_t> OptimizerShard::num_updates(size_t b) const {
  std::vector<int64_t> by_slot(parameters_.buckets()[b].slots.size());
  for_each_part(b, [&](const Part& part) {
    for (size_t i = 0; i < part.pieces.size(); ++i) by_slot[part.pieces[i].slot] = part.states[i].num_updates;
  });
  return by_slot;
}

void OptimizerShard::load_ranges(size_t b, const std::vector<int64_t>& num_updates, const ReadRange& read,
                                 const LateTensors& late) {
  const c10::NoGradGuard no_grad;
  const auto& bucket = parameters_.buckets()[b];
  for (size_t s = 0; s < buckets_[b].parts.size(); ++s) {
    for (Part& part : buckets_[b].parts[s]) {
      const int64_t in_range = buckets_[b].sections[s].range.begin + part.begin - range(b).begin;
      for (size_t i = 0; i < part.pieces.size(); ++i) {
        const Piece& piece = part.pieces[i];
        part.states[i].num_updates = num_updates[piece.slot];
        if (num_updates[piece.slot] == 0) continue;
        const ParameterState saved{
            .num_updates = num_updates[piece.slot],
            .tensors = read(bucket.slots[piece.slot].name, piece.begin, piece.begin + piece.num_elements)};
        load_piece(b, part, i, saved);
        for (const auto& [name, values] : late) {
          const auto found = saved.tensors.find(name);
          if (found == saved.tensors.end()) continue;
          values.narrow(0, in_range + piece.offset, piece.num_elements).copy_(found->second);
        }
      }
    }
  }
}

}  // namespace fulgur
