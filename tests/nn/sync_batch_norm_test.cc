#include "fulgur/nn/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/core/step_recording.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/nn/activation_checkpoint.h"
#include "fulgur/nn/batch_norm_owner.h"
#include "tests/testing/errors.h"
#include "tests/testing/ranks.h"

namespace fulgur::nn {
namespace {

using fulgur::testing::message_of;
using fulgur::testing::run_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

constexpr int64_t kNumFeatures = 5;
constexpr int64_t kNumSteps = 3;

struct Layer {
  std::string name{};
  int64_t dimension = 2;                      // 1, 2 or 3: BatchNorm1d, 2d or 3d
  std::vector<int64_t> value_sizes = {3, 4};  // sizes of an input after batch and channels
  BatchNormOptions options = BatchNormOptions(kNumFeatures);
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

std::vector<Layer> every_layer() {
  const auto options = [] { return BatchNormOptions(kNumFeatures); };
  return {
      {.name = "1d_of_2_dims", .dimension = 1, .value_sizes = {}},
      {.name = "1d_of_3_dims", .dimension = 1, .value_sizes = {4}},
      {.name = "2d"},
      {.name = "2d_channels_last", .format = at::MemoryFormat::ChannelsLast},
      {.name = "3d", .dimension = 3, .value_sizes = {2, 3, 2}},
      {.name = "3d_channels_last",
       .dimension = 3,
       .value_sizes = {2, 3, 2},
       .format = at::MemoryFormat::ChannelsLast3d},
      {.name = "not_affine", .options = options().affine(false)},
      {.name = "no_running_stats", .options = options().track_running_stats(false)},
      {.name = "cumulative_average", .options = options().momentum(std::nullopt)},
      {.name = "other_momentum_and_eps", .options = options().momentum(0.7).eps(0.3)},
  };
}

// One input and one cotangent per step.
struct Data {
  std::vector<at::Tensor> inputs{};
  std::vector<at::Tensor> cotangents{};  // gradients of the outputs
};

Data random_data(const Layer& layer, int64_t batch_size, at::ScalarType dtype) {
  torch::manual_seed(1);
  std::vector<int64_t> sizes = {batch_size, kNumFeatures};
  sizes.insert(sizes.end(), layer.value_sizes.begin(), layer.value_sizes.end());
  std::vector<int64_t> per_sample(sizes.size(), 1);
  per_sample[0] = batch_size;
  const at::Tensor trend = 0.3 * torch::arange(batch_size, at::kDouble).view(per_sample);  // ranks get different means
  const auto random = [&] { return torch::randn(sizes, at::kDouble); };
  Data data;
  for (int64_t step = 0; step < kNumSteps; ++step) {
    data.inputs.push_back((random() + trend).to(dtype).contiguous(layer.format));
    data.cotangents.push_back(random().to(dtype).contiguous(layer.format));
  }
  return data;
}

Data part_of(const Data& data, const std::vector<int64_t>& batch_sizes, int64_t rank, at::MemoryFormat format) {
  const auto mine = [&](const at::Tensor& all) {
    return all.split_with_sizes(batch_sizes)[static_cast<size_t>(rank)].contiguous(format);
  };
  Data part;
  for (const at::Tensor& input : data.inputs) part.inputs.push_back(mine(input));
  for (const at::Tensor& cotangent : data.cotangents) part.cotangents.push_back(mine(cotangent));
  return part;
}

// The results of training.
struct Trained {
  std::vector<at::Tensor> outputs{};
  std::vector<at::Tensor> input_grads{};
  at::Tensor weight_grad{};
  at::Tensor bias_grad{};
  at::Tensor running_mean{};
  at::Tensor running_var{};
  at::Tensor num_batches_tracked{};
};

// `Norm` is torch's module or ours, which have the same members.
template <class Norm>
Trained train(Norm& norm, const Data& data) {
  if (norm.weight.defined()) {
    const at::NoGradGuard no_grad;
    norm.weight.copy_(torch::linspace(0.5, -1.5, kNumFeatures));
    norm.bias.copy_(torch::linspace(-1, 2, kNumFeatures));
  }
  Trained trained;
  for (size_t step = 0; step < data.inputs.size(); ++step) {
    const at::Tensor input = data.inputs[step].clone().set_requires_grad(true);
    const at::Tensor output = norm.forward(input);
    output.backward(data.cotangents[step]);
    trained.outputs.push_back(output.detach());
    trained.input_grads.push_back(input.grad());
  }
  if (norm.weight.defined()) {
    trained.weight_grad = norm.weight.grad();
    trained.bias_grad = norm.bias.grad();
  }
  trained.running_mean = norm.running_mean;
  trained.running_var = norm.running_var;
  trained.num_batches_tracked = norm.num_batches_tracked;
  return trained;
}

template <class Norm>
Trained train_new(const Layer& layer, at::ScalarType dtype, const Data& data, Collective* collective = nullptr) {
  Norm norm(layer.options);
  norm->to(dtype);
  attach_sync_batch_norm(*norm, collective);
  return train(*norm, data);
}

Trained train_plain(const Layer& layer, at::ScalarType dtype, const Data& data) {
  if (layer.dimension == 1) return train_new<torch::nn::BatchNorm1d>(layer, dtype, data);
  if (layer.dimension == 2) return train_new<torch::nn::BatchNorm2d>(layer, dtype, data);
  return train_new<torch::nn::BatchNorm3d>(layer, dtype, data);
}

Trained train_sync(const Layer& layer, at::ScalarType dtype, const Data& data, Collective* collective) {
  if (layer.dimension == 1) return train_new<SyncBatchNorm1d>(layer, dtype, data, collective);
  if (layer.dimension == 2) return train_new<SyncBatchNorm2d>(layer, dtype, data, collective);
  return train_new<SyncBatchNorm3d>(layer, dtype, data, collective);
}

double distance(const at::Tensor& value, const at::Tensor& expected) {
  EXPECT_EQ(value.sizes(), expected.sizes());
  if (value.numel() == 0) return 0;
  const at::Tensor reference = expected.to(at::kDouble);
  return ((value.to(at::kDouble) - reference).abs() / reference.abs().clamp_min(1)).max().item<double>();
}

void expect_close(const at::Tensor& value, const at::Tensor& expected, double tolerance, const char* what) {
  ASSERT_EQ(value.defined(), expected.defined()) << what;
  if (!value.defined()) return;
  EXPECT_EQ(value.scalar_type(), expected.scalar_type()) << what;
  EXPECT_LE(distance(value, expected), tolerance) << what;
}

at::Tensor summed(at::Tensor value, Collective& collective) {
  if (value.defined()) collective.all_reduce(value).wait();
  return value;
}

using BatchSizes = std::vector<int64_t>;  // one per rank

std::string name_of(const std::tuple<Layer, BatchSizes, at::ScalarType>& param) {
  const auto& [layer, batch_sizes, dtype] = param;
  std::string name = layer.name + "_batches";
  for (const int64_t size : batch_sizes) name += "_" + std::to_string(size);
  return name + "_" + c10::toString(dtype);
}

class SyncBatchNormTraining : public ::testing::TestWithParam<std::tuple<Layer, BatchSizes, at::ScalarType>> {};

TEST_P(SyncBatchNormTraining, IsBatchNormOverTheBatchesOfAllRanks) {
  const auto& [layer, batch_sizes, dtype] = GetParam();
  const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-5;
  const int64_t total = std::accumulate(batch_sizes.begin(), batch_sizes.end(), int64_t{0});
  const Data data = random_data(layer, total, dtype);
  const Trained expected = train_plain(layer, dtype, data);
  run_ranks(static_cast<int64_t>(batch_sizes.size()), [&](World& world) {
    const auto mine = [&](const Data& all) { return part_of(all, batch_sizes, world.rank(), layer.format); };
    const Trained trained = train_sync(layer, dtype, mine(data), &world.control());
    const Data expected_here = mine({expected.outputs, expected.input_grads});
    for (size_t step = 0; step < trained.outputs.size(); ++step) {
      expect_close(trained.outputs[step], expected_here.inputs[step], tolerance, "output");
      expect_close(trained.input_grads[step], expected_here.cotangents[step], tolerance, "gradient of the input");
      EXPECT_TRUE(trained.outputs[step].is_contiguous(layer.format));
    }
    expect_close(summed(trained.weight_grad, world.data()), expected.weight_grad, tolerance, "gradient of the weight");
    expect_close(summed(trained.bias_grad, world.data()), expected.bias_grad, tolerance, "gradient of the bias");
    expect_close(trained.running_mean, expected.running_mean, tolerance, "running_mean");
    expect_close(trained.running_var, expected.running_var, tolerance, "running_var");
    expect_close(trained.num_batches_tracked, expected.num_batches_tracked, 0, "num_batches_tracked");
  });
}

INSTANTIATE_TEST_SUITE_P(Layers, SyncBatchNormTraining,
                         ::testing::Combine(::testing::ValuesIn(every_layer()),
                                            ::testing::Values(BatchSizes{7}, BatchSizes{4, 4}, BatchSizes{1, 5},
                                                              BatchSizes{3, 0, 4}),
                                            ::testing::Values(at::kDouble, at::kFloat)),
                         [](const auto& param) { return name_of(param.param); });

// A group in which no rank answers.
class NoCollective final : public Collective {
 public:
  int64_t rank() const override { return 0; }
  int64_t world_size() const override { return 2; }
  Work all_reduce(at::Tensor, ReduceOp) override { fail(); }
  Work reduce_scatter(at::Tensor, ReduceOp, at::Tensor) override { fail(); }
  Work all_gather(at::Tensor) override { fail(); }
  Work broadcast(at::Tensor, int64_t) override { fail(); }
  void barrier() override { fail(); }
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>&) override { fail(); }
  void abort(const std::string&) noexcept override {}

 private:
  [[noreturn]] static void fail() { throw std::runtime_error("a collective was called"); }
};

class SyncBatchNormAlone : public ::testing::TestWithParam<std::tuple<Layer, at::ScalarType>> {};

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

TEST_P(SyncBatchNormAlone, IsBatchNormToTheBit) {
  const auto& [layer, dtype] = GetParam();
  const Data data = random_data(layer, 6, dtype);
  const Trained expected = train_plain(layer, dtype, data);
  LocalCollective local;
  for (Collective* collective : {static_cast<Collective*>(nullptr), static_cast<Collective*>(&local)}) {
    const Trained trained = train_sync(layer, dtype, data, collective);
    for (size_t step = 0; step < trained.outputs.size(); ++step) {
      EXPECT_TRUE(same_bits(trained.outputs[step], expected.outputs[step]));
      EXPECT_TRUE(same_bits(trained.input_grads[step], expected.input_grads[step]));
    }
    EXPECT_TRUE(same_bits(trained.weight_grad, expected.weight_grad));
    EXPECT_TRUE(same_bits(trained.bias_grad, expected.bias_grad));
    EXPECT_TRUE(same_bits(trained.running_mean, expected.running_mean));
    EXPECT_TRUE(same_bits(trained.running_var, expected.running_var));
    EXPECT_TRUE(same_bits(trained.num_batches_tracked, expected.num_batches_tracked));
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, SyncBatchNormAlone,
                         ::testing::Combine(::testing::ValuesIn(every_layer()),
                                            ::testing::Values(at::kDouble, at::kFloat)),
                         [](const auto& param) {
                           return std::get<0>(param.param).name + "_" + c10::toString(std::get<1>(param.param));
                         });

TEST(SyncBatchNorm, InEvalModeIsBatchNormWithoutACollective) {
  for (const bool track : {true, false}) {
    const auto options = BatchNormOptions(kNumFeatures).track_running_stats(track);
    torch::nn::BatchNorm2d plain(options);
    SyncBatchNorm2d sync(options);
    NoCollective nobody;
    sync->attach(&nobody);
    if (track) {
      for (const auto& buffers : {plain->named_buffers(), sync->named_buffers()}) {
        buffers["running_mean"].copy_(torch::linspace(-1, 1, kNumFeatures));
        buffers["running_var"].copy_(torch::linspace(0.5, 2, kNumFeatures));
      }
    }
    plain->eval();
    sync->eval();
    const Data data = random_data({}, 4, at::kFloat);
    const Trained expected = train(*plain, data);
    const Trained trained = train(*sync, data);
    EXPECT_TRUE(trained.outputs[0].equal(expected.outputs[0]));
    EXPECT_TRUE(trained.input_grads[0].equal(expected.input_grads[0]));
    EXPECT_TRUE(trained.weight_grad.equal(expected.weight_grad));
    EXPECT_TRUE(same_bits(trained.running_mean, expected.running_mean));
    sync->train();
    EXPECT_EQ(message_of<std::runtime_error>([&] { sync->forward(data.inputs[0]); }), "a collective was called");
  }
}

class SyncBatchNorm16Bit : public ::testing::TestWithParam<std::tuple<at::ScalarType, bool, bool>> {};

// Two ranks compared with fp64 over both: the errors are those of torch's BatchNorm, or little more.
TEST_P(SyncBatchNorm16Bit, KeepsStatisticsAndTheirGradientsInFp32) {
  const auto& [dtype, fp32_module, affine] = GetParam();
  const at::ScalarType module_dtype = fp32_module ? at::kFloat : dtype;
  const Layer layer{.options = BatchNormOptions(kNumFeatures).affine(affine)};
  const Data data = random_data(layer, 8, dtype);
  Data same_in_fp64;
  for (const at::Tensor& input : data.inputs) same_in_fp64.inputs.push_back(input.to(at::kDouble));
  for (const at::Tensor& cotangent : data.cotangents) same_in_fp64.cotangents.push_back(cotangent.to(at::kDouble));
  const Trained exact = train_plain(layer, at::kDouble, same_in_fp64);
  const Trained plain = train_plain(layer, module_dtype, data);
  run_ranks(2, [&](World& world) {
    const auto mine = [&](const Data& all) { return part_of(all, {3, 5}, world.rank(), layer.format); };
    const Trained trained = train_sync(layer, module_dtype, mine(data), &world.control());
    const Data expected = mine({exact.outputs, exact.input_grads});
    const auto expect_error_like = [](const at::Tensor& value, const at::Tensor& value_expected, double torchs_error,
                                      at::ScalarType value_dtype) {
      EXPECT_EQ(value.scalar_type(), value_dtype);
      EXPECT_LE(distance(value, value_expected), std::max(2.5 * torchs_error, 1e-5));
    };
    for (size_t step = 0; step < data.inputs.size(); ++step) {
      expect_error_like(trained.outputs[step], expected.inputs[step],
                        distance(plain.outputs[step], exact.outputs[step]), dtype);
      expect_error_like(trained.input_grads[step], expected.cotangents[step],
                        distance(plain.input_grads[step], exact.input_grads[step]), dtype);
    }
    if (affine) {
      expect_error_like(summed(trained.weight_grad, world.data()), exact.weight_grad,
                        distance(plain.weight_grad, exact.weight_grad), module_dtype);
    }
    expect_error_like(trained.running_mean, exact.running_mean, distance(plain.running_mean, exact.running_mean),
                      module_dtype);
    expect_error_like(trained.running_var, exact.running_var, distance(plain.running_var, exact.running_var),
                      module_dtype);
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, SyncBatchNorm16Bit,
                         ::testing::Combine(::testing::Values(at::kBFloat16, at::kHalf), ::testing::Bool(),
                                            ::testing::Bool()));

TEST(SyncBatchNorm, VarianceOfLargeValuesIsNotLost) {
  torch::manual_seed(1);
  const at::Tensor all = torch::randn({64, kNumFeatures}) + 1e4;
  const at::Tensor expected = all.to(at::kDouble).var(0);
  run_ranks(2, [&](World& world) {
    SyncBatchNorm1d norm(BatchNormOptions(kNumFeatures).momentum(1.0));
    norm->attach(&world.control());
    norm->forward(all.split(32)[static_cast<size_t>(world.rank())]);
    EXPECT_LE(distance(norm->running_var, expected), 1e-3);  // the means of the ranks are fp32: 1e4 +- 5e-4
  });
}

TEST(SyncBatchNorm, OneValueOnEachRankIsEnough) {
  run_ranks(2, [](World& world) {
    SyncBatchNorm1d norm(1);
    norm->attach(&world.control());
    const at::Tensor output = norm->forward(torch::full({1, 1}, world.rank() == 0 ? -3.0 : 5.0));
    EXPECT_NEAR(output.item<double>(), world.rank() == 0 ? -1 : 1, 1e-5);
    EXPECT_NEAR(norm->running_var.item<double>(), 0.9 + 0.1 * 32, 1e-5);
  });
}

TEST(SyncBatchNorm, AnInputWithoutGradientNeedsNoCollectiveInBackward) {
  run_ranks(2, [](World& world) {
    SyncBatchNorm1d norm(1);
    norm->attach(&world.control());
    const at::Tensor output = norm->forward(torch::tensor({-3.0F, 5.0F}).view({2, 1}));
    if (world.rank() == 1) return;
    output.backward(torch::ones({2, 1}));
    EXPECT_NEAR(norm->bias.grad().item<double>(), 2, 1e-6);
  });
}

SyncBatchNorm1dImpl& norm_of(torch::nn::SequentialImpl& layers) { return *layers[1]->as<SyncBatchNorm1dImpl>(); }

struct Block {
  torch::nn::Sequential layers;
  at::Tensor input;

  explicit Block(World& world) {
    torch::manual_seed(1);
    layers = torch::nn::Sequential(torch::nn::Linear(3, 4), SyncBatchNorm1d(4), torch::nn::ReLU(),
                                   torch::nn::Linear(4, 4), SyncBatchNorm1d(4), torch::nn::Tanh());
    attach_sync_batch_norm(*layers, &world.control());
    input = (torch::randn({6, 3}) + world.rank()).set_requires_grad(true);
  }
  SyncBatchNorm1dImpl& norm() { return norm_of(*layers); }
};

TEST(SyncBatchNorm, GradientsUnderCheckpointAreTheSameBits) {
  std::mutex seeding;
  run_ranks(3, [&](World& world) {
    const auto make = [&] {
      const std::lock_guard lock(seeding);
      return Block(world);
    };
    Block kept = make(), replayed = make();
    const auto loss = [](const at::Tensor& out) { return (out * torch::arange(4)).square().mean(); };
    loss(kept.layers->forward(kept.input)).backward();
    const auto forward = [layers = replayed.layers](const at::Tensor& in) mutable { return layers->forward(in); };
    loss(checkpoint(forward, replayed.input)).backward();
    EXPECT_TRUE(replayed.input.grad().equal(kept.input.grad()));
    const auto expected = kept.layers->parameters(), parameters = replayed.layers->parameters();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(parameters[i].grad().equal(expected[i].grad()));
    EXPECT_EQ(kept.norm().num_batches_tracked.item<int64_t>(), 1);
    EXPECT_EQ(replayed.norm().num_batches_tracked.item<int64_t>(), 2);
  });
}

template <class Sync, class Plain>
void expect_refusals_of_torch(const std::vector<at::Tensor>& inputs) {
  NoCollective nobody;
  Sync sync(kNumFeatures);
  Plain plain(kNumFeatures);
  sync->attach(&nobody);
  const auto refusal = [](auto& norm, const at::Tensor& input) {
    try {
      norm->forward(input);
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("none");
  };
  for (const at::Tensor& input : inputs) {
    EXPECT_EQ(refusal(sync, input), refusal(plain, input));
    EXPECT_THAT(refusal(sync, input), HasSubstr("D input (got "));
  }
}

TEST(SyncBatchNorm, RefusesOtherDimensionsInTheWordsOfTorch) {
  const at::Tensor d1 = torch::ones({5}), d2 = torch::ones({2, 5}), d4 = torch::ones({2, 5, 2, 2});
  const at::Tensor d3 = torch::ones({2, 5, 2}), d5 = torch::ones({2, 5, 2, 2, 2});
  expect_refusals_of_torch<SyncBatchNorm1d, torch::nn::BatchNorm1d>({d1, d4});
  expect_refusals_of_torch<SyncBatchNorm2d, torch::nn::BatchNorm2d>({d3, d5});
  expect_refusals_of_torch<SyncBatchNorm3d, torch::nn::BatchNorm3d>({d2, d4});
}

TEST(SyncBatchNorm, RefusesAnotherNumberOfChannels) {
  NoCollective nobody;
  SyncBatchNorm2d norm(BatchNormOptions(7).affine(false));
  norm->attach(&nobody);
  EXPECT_THAT(message_of<c10::Error>([&] { norm->forward(torch::ones({2, 8, 3, 3})); }),
              HasSubstr("7 channels (num_features), got input size [2, 8, 3, 3]"));
}

TEST(SyncBatchNorm, TooFewValuesOverAllRanksAreRefusedOnEach) {
  for (const BatchSizes& batch_sizes : {BatchSizes{1, 0, 0}, BatchSizes{0, 0, 0}}) {
    run_ranks(3, [&](World& world) {
      SyncBatchNorm1d norm(4);
      norm->attach(&world.control());
      const at::Tensor input = torch::ones({batch_sizes[static_cast<size_t>(world.rank())], 4});
      const std::string got = "got " + std::to_string(batch_sizes[0]) + " over 3 ranks";
      EXPECT_THAT(message_of<c10::Error>([&] { norm->forward(input); }), HasSubstr(got));
      world.control().barrier();  // the group still works
    });
  }
}

// Ranks decide by themselves when they replay a step, but all of them have to take part in an exchange.
TEST(SyncBatchNorm, IsNotRecordedIfThereAreOtherRanks) {
  for (const int64_t num_ranks : {1, 2}) {
    run_ranks(num_ranks, [&](World& world) {
      const StepRecording rehearsal(c10::kCPU, StepRecording::Kind::rehearsal);
      SyncBatchNorm1d norm(3);
      attach_sync_batch_norm(*norm, &world.control());
      norm->forward(torch::randn({4, 3}));
      EXPECT_EQ(rehearsal.refusal().starts_with("SyncBatchNorm exchanges statistics"), num_ranks > 1);
    });
  }
}

TEST(SyncBatchNorm, RefusesASecondDerivative) {
  run_ranks(2, [](World& world) {
    SyncBatchNorm1d norm(4);
    norm->attach(&world.control());
    const at::Tensor input = torch::rand({3, 4}).set_requires_grad(true);
    const at::Tensor loss = norm->forward(input).square().sum();
    const auto differentiate = [&] {
      torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    };
    EXPECT_THAT(message_of<c10::Error>(differentiate), HasSubstr("no second derivative"));
  });
}

// Rank 1 of three calls `fail`, which throws; the others call `body`.
void expect_all_fail(const std::function<void(SyncBatchNorm2d&, World&)>& fail,
                     const std::function<void(SyncBatchNorm2d&)>& body, const std::string& reason) {
  std::atomic<int> num_failed = 0;
  const auto run = [&](World& world) {
    SyncBatchNorm2d norm(2);
    norm->attach(&world.control());
    if (world.rank() == 1) fail(norm, world);
    EXPECT_THAT(message_of<DistributedError>([&] { body(norm); }), HasSubstr("rank 1 failed"));
    ++num_failed;
  };
  EXPECT_THAT(message_of<std::exception>([&] { run_ranks(3, run); }), HasSubstr(reason));
  EXPECT_EQ(num_failed, 2);
}

at::Tensor images() { return torch::rand({2, 2, 3, 3}).set_requires_grad(true); }

TEST(SyncBatchNorm, ABadInputOnOneRankStopsTheOthersInForward) {
  expect_all_fail([](SyncBatchNorm2d& norm, World&) { norm->forward(torch::ones({2, 2, 3})); },
                  [](SyncBatchNorm2d& norm) { norm->forward(images()); }, "expected 4D input (got 3D input)");
}

TEST(SyncBatchNorm, ARankThatFailsStopsTheOthersInBackward) {
  expect_all_fail(
      [](SyncBatchNorm2d& norm, World&) {
        norm->forward(images());
        throw std::runtime_error("boom");
      },
      [](SyncBatchNorm2d& norm) { norm->forward(images()).sum().backward(); }, "boom");
}

TEST(SyncBatchNorm, HasTheNamesOfBatchNorm) {
  SyncBatchNorm2d sync(3);
  torch::nn::BatchNorm2d plain(3);
  EXPECT_EQ(sync->named_parameters().keys(), plain->named_parameters().keys());
  EXPECT_EQ(sync->named_buffers().keys(), plain->named_buffers().keys());
}

TEST(SyncBatchNorm, PrintsItsOptions) {
  std::ostringstream out;
  out << SyncBatchNorm2d(64) << '\n' << SyncBatchNorm1d(BatchNormOptions(2).momentum(std::nullopt).affine(false));
  EXPECT_EQ(out.str(),
            "fulgur::nn::SyncBatchNorm2d(64, eps=1e-05, momentum=0.1, affine=true, track_running_stats=true)\n"
            "fulgur::nn::SyncBatchNorm1d(2, eps=1e-05, momentum=None, affine=false, track_running_stats=true)");
}

TEST(SyncBatchNorm, ACloneHasValuesOfItsOwnAndIsAttachedToNothing) {
  torch::nn::Sequential layers(torch::nn::Linear(3, 4), SyncBatchNorm1d(4));
  NoCollective nobody;
  norm_of(*layers).running_mean.fill_(3);
  attach_sync_batch_norm(*layers, &nobody);
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(layers->clone());
  const SyncBatchNorm1dImpl& norm = norm_of(*clone);
  EXPECT_TRUE(norm.running_mean.eq(3).all().item<bool>());
  clone->forward(torch::rand({5, 3}));
  EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 1);
  EXPECT_EQ(norm_of(*layers).num_batches_tracked.item<int64_t>(), 0);
}

TEST(AttachSyncBatchNorm, ReachesEveryDepthAndDetaches) {
  torch::nn::ModuleList layers(SyncBatchNorm1d(2), torch::nn::ModuleList(torch::nn::Sequential(SyncBatchNorm1d(2))));
  NoCollective nobody;
  for (const auto& norm : layers->modules(/*include_self=*/false)) {
    auto* sync = norm->as<SyncBatchNorm1dImpl>();
    if (sync == nullptr) continue;
    attach_sync_batch_norm(*layers, &nobody);
    EXPECT_THROW(sync->forward(torch::rand({3, 2})), std::runtime_error);
    attach_sync_batch_norm(*layers, nullptr);
    sync->forward(torch::rand({3, 2}));
  }
}

TEST(PlainBatchNormNames, AreThoseOfTorchsOwnOnly) {
  torch::nn::Sequential inner(torch::nn::BatchNorm2d(2), SyncBatchNorm2d(2), torch::nn::BatchNorm3d(2));
  torch::nn::ModuleList layers(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), SyncBatchNorm1d(4), inner);
  EXPECT_THAT(plain_batch_norm_names(*layers), ElementsAre("1", "3.0", "3.2"));
  EXPECT_THAT(plain_batch_norm_names(*torch::nn::BatchNorm1d(4)), ElementsAre(""));
  EXPECT_THAT(plain_batch_norm_names(*SyncBatchNorm1d(4)), ElementsAre());
}

struct OwnerOfTwo : torch::nn::Module, BatchNormOwner {
  std::vector<std::string> batch_norm_paths() const override { return {"", "encoder.norm"}; }
};

TEST(PlainBatchNormNames, AreThoseOfAnOwnerToo) {
  const auto owner = std::make_shared<OwnerOfTwo>();
  EXPECT_THAT(plain_batch_norm_names(*owner), ElementsAre("", "encoder.norm"));
  torch::nn::ModuleList layers(torch::nn::Linear(3, 4));
  layers->push_back(owner);
  EXPECT_THAT(plain_batch_norm_names(*layers), ElementsAre("1", "1.encoder.norm"));
}

}  // namespace
}  // namespace fulgur::nn
