// The gradients of ddp compared with those of torch's own reducer, c10d::Reducer.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "fulgur/distributed/gloo_adapter.h"
#include "fulgur/optim/sgd.h"
#include "fulgur/strategies/engine/gradient_reducer.h"
#include "tests/testing/ranks.h"

namespace fulgur {
namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear first{nullptr}, unused{nullptr}, last{nullptr};
  Net() {
    first = register_module("first", torch::nn::Linear(20, 30));
    unused = register_module("unused", torch::nn::Linear(3, 3));
    last = register_module("last", torch::nn::Linear(30, 1));
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) parameter.normal_(0, 1, generator);
  }
  at::Tensor loss(int64_t rank) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank));
    return last->forward(first->forward(torch::randn({8, 20}, generator)).tanh()).pow(2).mean();
  }
};

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                                     int64_t world_size) {
  GroupConfig group{.name = "reference",
                    .store = store,
                    .ranks = {},
                    .rank = rank,
                    .timeout = std::chrono::seconds(20),
                    .network = {.interface = "lo"}};
  for (int64_t i = 0; i < world_size; ++i) group.ranks.push_back(i);
  const auto backend = make_gloo_backend(group);
  auto made = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(rank), static_cast<int>(world_size));
  made->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  made->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  made->setGroupName("reference");
  return made;
}

// Gradients that c10d::Reducer averages over ranks.
std::vector<at::Tensor> by_c10d(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size) {
  Net net;
  const std::vector<at::Tensor> params = net.parameters();
  std::vector<size_t> all(params.size());
  std::iota(all.begin(), all.end(), size_t{0});
  c10d::Reducer reducer(params, {all}, process_group(store, rank, world_size), std::vector<bool>(params.size(), false),
                        /*bucket_bytes_cap=*/1 << 20, /*find_unused_parameters=*/true,
                        /*gradient_as_bucket_view=*/false, /*param_names=*/{}, /*first_bucket_bytes_cap=*/1 << 20,
                        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
                        /*bucket_bytes_cap_list=*/{});
  const at::Tensor loss = net.loss(rank);
  reducer.prepare_for_forward();
  reducer.prepare_for_backward({loss});
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& param : params) gradients.push_back(param.grad());
  return gradients;
}

TEST(GradientReducer, GivesTheGradientsOfC10dsReducer) {
  constexpr int64_t kWorldSize = 2;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  testing::run_ranks(kWorldSize, [&](World& world) {
    Net net;
    const Optimizers optimizers(optim::SGD(net.parameters(), {.lr = 1.0}));
    const FlatParameters flat(net, optimizers, {.world_size = kWorldSize});
    GradientReducer reducer(flat, world.data(), world.control());
    reducer.begin();
    net.loss(world.rank()).backward();
    std::vector<double> extra;
    reducer.finish(extra);
    const std::vector<at::Tensor> expected = by_c10d(store, world.rank(), kWorldSize);
    for (size_t i = 0; i < expected.size(); ++i) {
      const at::Tensor got = net.parameters()[i].grad();
      ASSERT_EQ(got.defined(), expected[i].defined()) << i;
      if (got.defined()) {
        EXPECT_TRUE(torch::allclose(got / kWorldSize, expected[i], 1e-6, 1e-7)) << i;
      }
    }
  });
}

}  // namespace
}  // namespace fulgur
