#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "fulgur/optim/update_rules.h"

// The interface between fused_update, which checks and cuts into chunks, and the vector code, which is compiled once
// per instruction set. A call runs on the calling thread.
namespace fulgur::optim::internal {

template <class T>
struct KernelCall {
  size_t rule_index;  // index in the variant Rule
  const void* rule;
  const void* next_rule;  // Prediction::next, of the same type; or null
  T* param;
  const void* grad;
  c10::ScalarType grad_type;
  T* states[kMaxStates];
  void* copy_out;
  c10::ScalarType copy_type;
  size_t num_elements;
  T factor;
  T clip_value;
  T next_gradient;   // Prediction::gradient
  T repeat;          // Prediction::repeat
  bool stream_copy;  // write copy_out past the caches; it is aligned to 64 bytes then
};

void run_kernel(const KernelCall<float>& call);
void run_kernel(const KernelCall<double>& call);

}  // namespace fulgur::optim::internal
