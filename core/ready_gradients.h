#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace fulgur {

// What Tensor::grad_fn()->name() says of a loss that came with its gradients.
inline constexpr std::string_view kReadyGradients = "ReadyGradients";

// For a loss that was computed together with its gradients, by a compiled step or a CUDA graph: gives the loss a
// backward that passes the gradients to the parameters. That backward throws c10::Error if it runs twice or is to be
// differentiated. The loss is one number, and there is one gradient for each parameter. A parameter that needs no
// gradient gets none; a parameter that is listed several times gets the sum.
void set_ready_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters,
                         std::vector<at::Tensor> gradients);

// Returns `gradient` itself if autograd may keep it as the parameter's gradient: it has the parameter's sizes and
// strides, fills its storage, and no other handle or tensor shares it. Otherwise returns a copy in that layout.
at::Tensor fit_for_parameter(const at::Tensor& gradient, const at::Tensor& parameter);

// Calls loss.backward(). For a loss with ready gradients and no hooks, bypasses autograd's engine, which costs more
// than the step of a small network.
void run_backward(const at::Tensor& loss);

}  // namespace fulgur
