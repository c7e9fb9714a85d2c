// What flat parameters cost a model whose time is forward and backward: 50 M parameters in buckets against the same
// module with the tensors that it was made with.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:flat_overhead
#include <ATen/Parallel.h>

#include "bench/side_by_side.h"
#include "fulgur.h"
#include "fulgur/strategies/engine/flat_parameters.h"

namespace {

using namespace fulgur;

struct Mlp : torch::nn::Module {
  torch::nn::Sequential layers{nullptr};
  Mlp() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(Linear(2048, 4096), ReLU(), Linear(4096, 4096), ReLU(),
                                                  Linear(4096, 4096), ReLU(), Linear(4096, 2048)));
  }
};

void forward_and_backward(Mlp& module, const at::Tensor& x) {
  for (const at::Tensor& param : module.parameters()) param.mutable_grad().reset();
  module.layers->forward(x).sum().backward();
}

}  // namespace

int main() {
  at::set_num_threads(1);
  Mlp plain, flattened;
  const Optimizers optimizers = optim::AdamW(flattened.parameters(), {});
  const FlatParameters flat(flattened, optimizers);
  const at::Tensor x = torch::randn({16, 2048});
  bench::side_by_side("step", 1,
                      {{"tensors as they were made", [&] { forward_and_backward(plain, x); }}, {"flat parameters", [&] {
                                                                                                  flat.check_in_place();
                                                                                                  forward_and_backward(
                                                                                                      flattened, x);
                                                                                                }}});
}
