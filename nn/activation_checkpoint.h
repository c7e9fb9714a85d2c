#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fulgur {
namespace internal {

class Packer;

// For the lifetime of the object, tensors that autograd saves in this thread are not kept, but recomputed by `replay`
// when backward needs them. The inputs of a replay follow the same rule: in a nested recording they are recomputed,
// too.
class CheckpointRecording {
 public:
  using Replay = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointRecording(Replay replay, const std::vector<at::Tensor>& inputs);
  ~CheckpointRecording();
  CheckpointRecording(const CheckpointRecording&) = delete;
  CheckpointRecording& operator=(const CheckpointRecording&) = delete;

 private:
  std::unique_ptr<Packer> packer_;
};

// Calls visit(tensor) for each tensor in an argument of a call, in order. Skips arguments of other types.
template <class Visit>
void visit_tensors(at::Tensor& tensor, const Visit& visit) {
  visit(tensor);
}
template <class Visit>
void visit_tensors(std::vector<at::Tensor>& tensors, const Visit& visit) {
  for (at::Tensor& tensor : tensors) visit(tensor);
}
template <class Other, class Visit>
void visit_tensors(Other&, const Visit&) {}

}  // namespace internal

// Activation checkpointing: calls fn(inputs...) and lets autograd keep only the inputs. Backward calls fn a second time
// to recompute the tensors that it needs: about a third more time for a fraction of the memory.
//   at::Tensor x = checkpoint([block](const at::Tensor& in) { return block->forward(in); }, x);
// Gradients are those of fn(inputs...), bit for bit: random numbers (dropout) and autocast are the same in both calls,
// hooks on a weight fire once, even if the weight is used elsewhere, too, and regions may be nested. Anything may be
// returned: a tensor, several, none.
//   fn runs again long after this function has returned: what it captures must still exist (capture by value; a module
//   by shared_ptr or `this`). It must do the same both times; side effects (counting, BatchNorm's running statistics)
//   happen twice. The second call is ended by an exception of a private type, as soon as everything is recomputed.
//   Weights that fn uses must not change before backward.
// Inputs: a Tensor or std::vector<Tensor> each; arguments of other types are copied. Without gradients, just calls fn.
// Errors: backward throws c10::Error if fn saved something else the second time, or a weight has changed since.
// Threading: any thread; backward may run on another one. Random numbers: the default generators only, and no other
// thread may draw from them during backward.
// Source: Chen et al. 2016, arXiv:1604.06174; the scheme is torch.utils.checkpoint's with use_reentrant=False. The
// first call replaces libtorch's autograd engine: do not call checkpoint() in a process that has loaded Python's torch.
template <class Fn, class... Inputs>
std::invoke_result_t<Fn&, Inputs&...> checkpoint(Fn fn, Inputs... inputs) {
  if (!c10::GradMode::is_enabled()) return std::invoke(fn, inputs...);
  struct Call {
    Fn fn;
    std::tuple<Inputs...> arguments;  // without the tensors, which `replay` gets
  };
  const auto call = std::make_shared<Call>(Call{std::move(fn), std::tuple<Inputs...>(inputs...)});
  std::vector<at::Tensor> tensors;
  (internal::visit_tensors(inputs, [&](const at::Tensor& tensor) { tensors.push_back(tensor); }), ...);
  const auto with = [call](const auto& replace) {
    std::tuple<Inputs...> arguments = call->arguments;
    std::apply([&](auto&... argument) { (internal::visit_tensors(argument, replace), ...); }, arguments);
    return arguments;
  };
  call->arguments = with([](at::Tensor& tensor) { tensor.reset(); });
  const auto replay = [call, with](const std::vector<at::Tensor>& saved) {
    size_t next = 0;
    auto arguments = with([&](at::Tensor& tensor) { tensor = saved[next++]; });
    std::apply(call->fn, arguments);
  };
  const internal::CheckpointRecording recording(replay, tensors);
  return std::invoke(call->fn, inputs...);
}

}  // namespace fulgur
