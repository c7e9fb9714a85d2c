#include "fulgur/distributed/rank_messages.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace fulgur {
namespace {

std::vector<int64_t> all_gather_sizes(Collective& group, int64_t size) {
  const at::Tensor sizes = at::zeros({group.world_size()}, at::kLong);
  sizes[group.rank()].fill_(size);
  group.all_gather(sizes).wait();
  const auto* first = sizes.const_data_ptr<int64_t>();
  return {first, first + sizes.numel()};
}

// The rows of all ranks, concatenated on the CPU; the number of rows may differ between ranks. They travel as bytes,
// because a collective does not take every type.
at::Tensor all_gather_rows(Collective& group, const at::Tensor& rows) {
  const at::Tensor own = rows.flatten().view(at::kByte);
  const std::vector<int64_t> sizes = all_gather_sizes(group, own.numel());
  const int64_t longest = std::ranges::max(sizes);
  if (longest == 0) return rows;
  const at::Tensor flat = at::zeros({longest * group.world_size()}, own.options());
  flat.narrow(0, longest * group.rank(), own.numel()).copy_(own);
  group.all_gather(flat).wait();
  std::vector<at::Tensor> parts;
  std::vector<int64_t> shape = rows.sizes().vec();
  shape[0] = -1;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (sizes[rank] == 0) continue;
    const at::Tensor part = flat.narrow(0, longest * static_cast<int64_t>(rank), sizes[rank]);
    parts.push_back(part.clone().view(rows.scalar_type()).view(shape));  // a copy, which begins where its type may
  }
  return at::cat(parts);
}

constexpr std::string_view kUndefined = "an undefined tensor";

std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::string(kUndefined);
  return c10::str(c10::toString(tensor.scalar_type()), " ", tensor.sizes());
}

// All ranks check the shapes of all ranks, so that no rank waits for one that has thrown.
void check_same_shape(const std::vector<std::string>& shapes) {
  for (size_t rank = 0; rank < shapes.size(); ++rank) {
    TORCH_CHECK_VALUE(shapes[rank] == shapes[0] && shapes[rank] != kUndefined,
                      "all_gather: every rank must give a tensor of the same shape and type; rank 0 gave ", shapes[0],
                      ", rank ", rank, " gave ", shapes[rank]);
  }
}

}  // namespace

at::Tensor all_gather_tensors(Collective& group, const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  check_same_shape(all_gather_bytes(group, shape_of(tensor)));
  const at::Tensor own = tensor.to(c10::kCPU).resolve_conj().resolve_neg().contiguous().view(-1).view(at::kByte);
  const at::Tensor all = at::empty({group.world_size() * own.numel()}, at::kByte);
  all.narrow(0, group.rank() * own.numel(), own.numel()).copy_(own);
  if (all.numel() > 0) group.all_gather(all).wait();
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), group.world_size());
  return all.view(tensor.scalar_type()).view(shape).to(tensor.device());
}

std::vector<std::string> all_gather_bytes(Collective& group, std::string_view bytes) {
  const std::vector<int64_t> sizes = all_gather_sizes(group, static_cast<int64_t>(bytes.size()));
  const int64_t longest = std::max<int64_t>(1, std::ranges::max(sizes));
  const at::Tensor flat = at::zeros({longest * group.world_size()}, at::kByte);
  auto* data = reinterpret_cast<char*>(flat.mutable_data_ptr<uint8_t>());
  std::memcpy(data + longest * group.rank(), bytes.data(), bytes.size());
  group.all_gather(flat).wait();
  std::vector<std::string> by_rank;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    by_rank.emplace_back(data + longest * static_cast<int64_t>(rank), static_cast<size_t>(sizes[rank]));
  }
  return by_rank;
}

void broadcast_tensors(Collective& group, const std::vector<at::Tensor>& tensors, int64_t root, int64_t chunk_bytes) {
  if (group.world_size() == 1) return;
  const c10::NoGradGuard no_grad;
  for (size_t begin = 0; begin < tensors.size();) {
    int64_t num_bytes = 0;
    size_t end = begin;
    while (end < tensors.size() &&
           (end == begin || num_bytes + static_cast<int64_t>(tensors[end].nbytes()) <= chunk_bytes)) {
      num_bytes += static_cast<int64_t>(tensors[end++].nbytes());
    }
    std::vector<at::Tensor> parts;
    for (size_t i = begin; i < end; ++i) {
      parts.push_back(tensors[i].detach().resolve_conj().resolve_neg().contiguous().view(-1).view(at::kByte));
    }
    const at::Tensor packed = at::cat(parts);
    if (packed.numel() > 0) group.broadcast(packed, root).wait();
    int64_t offset = 0;
    std::vector<at::Tensor> places, bytes;  // contiguous tensors, which a GPU copies all at once
    for (size_t i = begin; i < end && group.rank() != root; ++i) {
      const at::Tensor part = packed.narrow(0, offset, parts[i - begin].numel());
      offset += part.numel();
      const bool is_lazy = tensors[i].is_conj() || tensors[i].is_neg();  // has other values than its memory
      if (tensors[i].is_contiguous() && !is_lazy) {
        places.push_back(tensors[i].detach().view(-1).view(at::kByte));
        bytes.push_back(part);
        continue;
      }
      at::Tensor received = at::empty_like(tensors[i], at::MemoryFormat::Contiguous);
      received.view(-1).view(at::kByte).copy_(part);
      at::Tensor(tensors[i]).detach().copy_(received);
    }
    if (!places.empty()) at::_foreach_copy_(places, bytes);
    begin = end;
  }
}

void CollectiveRanks::all_reduce(std::span<double> values, Reduction reduction) {
  if (group_.world_size() == 1 || values.empty()) return;
  const at::Tensor flat = at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble);
  const bool is_sum = reduction == Reduction::sum || reduction == Reduction::mean;
  group_.all_reduce(flat, is_sum ? ReduceOp::sum : reduction == Reduction::min ? ReduceOp::min : ReduceOp::max).wait();
  if (reduction == Reduction::mean) flat.div_(group_.world_size());
}

MetricStates CollectiveRanks::combine(MetricStates states) {
  if (group_.world_size() == 1) return states;
  const c10::NoGradGuard no_grad;
  for (MetricState& state : states) {
    const c10::Device device = state.value.device();
    const at::Tensor on_host = state.value.to(c10::kCPU);
    if (state.combine == Combine::sum) {
      const bool is_whole = at::isIntegralType(on_host.scalar_type(), /*includeBool=*/true);
      const at::Tensor sum = on_host.to(is_whole ? at::kLong : on_host.scalar_type(), /*non_blocking=*/false,
                                        /*copy=*/true, at::MemoryFormat::Contiguous);
      group_.all_reduce(sum.view(-1)).wait();
      state.value = sum.to(device, state.value.scalar_type());
    } else {
      state.value = all_gather_rows(group_, on_host).to(device);
    }
  }
  return states;
}

}  // namespace fulgur
