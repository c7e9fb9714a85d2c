#include "fulgur/strategies/engine/gradient_buckets.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <utility>

namespace fulgur {

void copy_into(const at::Tensor& gradients, const FlatParameters::Slot& slot, const at::Tensor& grad) {
  const c10::NoGradGuard no_grad;
  const bool may_copy_bytes =
      grad.is_cpu() && grad.scalar_type() == gradients.scalar_type() && grad.strides() == slot.param.strides();
  if (!may_copy_bytes) return void(view_in(gradients, slot).copy_(grad));
  auto* place = static_cast<std::byte*>(gradients.mutable_data_ptr()) + slot.begin * gradients.itemsize();
  const bool is_there = place == grad.const_data_ptr() || grad.numel() == 0;
  if (!is_there) std::memcpy(place, grad.const_data_ptr(), grad.nbytes());
}

void add_into(const at::Tensor& gradients, const FlatParameters::Slot& slot, const at::Tensor& grad) {
  const c10::NoGradGuard no_grad;
  view_in(gradients, slot).add_(grad);
}

void move_into(const at::Tensor& gradients, const FlatParameters::Bucket& bucket, std::vector<at::Tensor>& arrived,
               bool adds, bool together) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> places, moved;
  for (size_t s = 0; s < arrived.size(); ++s) {
    const at::Tensor grad = std::exchange(arrived[s], {});
    if (!grad.defined()) continue;
    if (together) {
      places.push_back(view_in(gradients, bucket.slots[s]));
      moved.push_back(grad);
    } else {
      adds ? add_into(gradients, bucket.slots[s], grad) : copy_into(gradients, bucket.slots[s], grad);
    }
  }
  if (places.empty()) return;
  adds ? at::_foreach_add_(places, moved) : at::_foreach_copy_(places, moved);
}

Work reduce_whole(Collective& data, const at::Tensor& gradients, bool rank_order) {
  return rank_order ? all_reduce_in_rank_order(data, gradients) : data.all_reduce(gradients);
}

}  // namespace fulgur
