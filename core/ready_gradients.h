#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace fulgur {

// What Tensor::grad_fn()->name() says of a loss that came with its gradients.
inline constexpr std::string_view kReadyGradients = "ReadyGradients";

// Gives a loss that was computed together with its gradients (by a compiled step) a backward, which hands them to the
// parameters. It runs once, and has no second derivatives: otherwise it throws c10::Error. The loss is one number, and
// there is one gradient for each parameter. A parameter that needs no gradient gets none; one that is there several
// times gets the sum.
void set_ready_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                         std::vector<at::Tensor> gradients);

// loss.backward(). A loss with ready gradients takes a shorter way if nothing hooks into it: autograd's engine costs
// more than the step of a small network.
void run_backward(const at::Tensor& loss);

}  // namespace fulgur
