#include "fulgur/base/autocast.h"

#include <ATen/autocast_mode.h>

namespace fulgur {
namespace {

void set(const AutocastState& state) {
  at::autocast::set_autocast_enabled(state.device_type, state.enabled);
  at::autocast::set_autocast_dtype(state.device_type, state.dtype);
}

}  // namespace

AutocastState AutocastState::now(c10::DeviceType device_type) {
  return {.device_type = device_type,
          .enabled = at::autocast::is_autocast_enabled(device_type),
          .dtype = at::autocast::get_autocast_dtype(device_type)};
}

ScopedAutocast::ScopedAutocast(const AutocastState& state)
    : before_(AutocastState::now(state.device_type)), other_dtype_(state.dtype != before_.dtype) {
  if (other_dtype_) at::autocast::clear_cache();  // the cache does not know the types of its tensors
  set(state);
  at::autocast::increment_nesting();
}

ScopedAutocast::~ScopedAutocast() {
  if (at::autocast::decrement_nesting() == 0 || other_dtype_) at::autocast::clear_cache();
  set(before_);
}

}  // namespace fulgur
