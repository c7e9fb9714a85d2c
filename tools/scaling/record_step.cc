#include "tools/scaling/record_step.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fulgur/core/module.h"
#include "fulgur/optim/adam.h"
#include "fulgur/strategies/estimate_memory.h"

namespace fulgur::scaling {
namespace {

constexpr int kRecordedStep = 3;

// Adam that records its updates.
class RecordedAdam final : public optim::internal::AdamBase {
 public:
  RecordedAdam(std::vector<at::Tensor> params, std::shared_ptr<Recorder> recorder)
      : AdamBase("Adam", one_group(std::move(params)), {.lr = 1e-5}, Decay::l2), recorder_(std::move(recorder)) {}

  // Called once for each piece of a parameter that is updated; for the first update also by those who only want to
  // know the rule.
  optim::Rule rule(const Group& group, int64_t num_updates) const override {
    if (recorder_ && num_updates > 1) recorder_->add({.kind = Event::Kind::update});
    return AdamBase::rule(group, num_updates);
  }

 private:
  std::shared_ptr<Recorder> recorder_;
};

class Transformer final : public Module {
 public:
  Transformer(const ModelShape& shape, c10::Device device, std::shared_ptr<Recorder> recorder)
      : recorder_(std::move(recorder)) {
    for (int64_t layer = 0; layer < shape.layers; ++layer) {
      const int64_t w = shape.width;
      if (shape.is_perceptron) {
        add(layer, "linear", w, w, device);
        continue;
      }
      add(layer, "qkv", 3 * w, w, device);
      add(layer, "proj", w, w, device);
      add(layer, "up", 4 * w, w, device);
      add(layer, "down", w, 4 * w, device);
    }
    if (!recorder_) return;
    for (const at::Tensor& weight : weights_) {
      weight.register_hook([recorder = recorder_.get()](const at::Tensor& gradient) {
        recorder->add({.kind = Event::Kind::gradient, .num_elements = gradient.numel()});
      });
    }
  }

  at::Tensor training_step(const Batch&, int64_t) override {
    recorder_->add({.kind = Event::Kind::forward});
    at::Tensor x = at::ones({1, weights_.front().size(1)}, weights_.front().options());
    for (const at::Tensor& weight : weights_) x = x.narrow(1, 0, weight.size(1)).matmul(weight.t());
    return x.sum();
  }
  Optimizers configure_optimizers() override { return RecordedAdam(weights_, recorder_); }

 private:
  void add(int64_t layer, const std::string& name, int64_t rows, int64_t columns, c10::Device device) {
    const auto options = at::device(device).dtype(at::kFloat);
    const double value = 1.0 / static_cast<double>(columns);
    const at::Tensor weight =
        device.is_cpu() ? at::full({rows, columns}, value, options) : at::empty({rows, columns}, options);
    weights_.push_back(register_parameter("layer" + std::to_string(layer) + "_" + name, weight));
  }

  const std::shared_ptr<Recorder> recorder_;
  std::vector<at::Tensor> weights_;
};

// Calls the strategy as the loops do for a step of one micro-batch.
void step(Strategy& strategy, Recorder& recorder, int64_t batch_idx) {
  const at::Tensor loss = strategy.training_step({}, batch_idx);
  strategy.zero_grad(/*optimizer=*/0);
  strategy.backward(loss, /*is_last=*/true);
  recorder.add({.kind = Event::Kind::backward});
  const AccumulationWindow all = strategy.end_micro_batch({.micro_batches = 1, .loss_sum = 0.0}, /*is_last=*/true);
  strategy.optimizer_step(/*optimizer=*/0, {.micro_batches = std::max<int64_t>(1, all.micro_batches)});
  recorder.add({.kind = Event::Kind::end});
}

// The number of ranks among which this one's update was divided: what crosses groups is a shard of what is reduced
// within one.
int64_t shards_of(const std::vector<Event>& events, int64_t world_size) {
  int64_t whole = 0;
  for (const Event& event : events) {
    if (event.kind != Event::Kind::launch) continue;
    if (event.scope == Scope::world && event.exchange == Exchange::reduce_scatter) return world_size;
    if (event.scope == Scope::within && event.exchange == Exchange::reduce_scatter && whole == 0) {
      whole = event.num_bytes;
    }
    if (event.scope == Scope::across && whole > 0) return whole / event.num_bytes;
  }
  return 1;
}

}  // namespace

ModelShape shape_of(double num_params, int64_t width) {
  const auto w = static_cast<double>(width);
  return {.layers = std::max<int64_t>(1, std::llround(num_params / (12 * w * w))), .width = width};
}

RecordedStep record_step(const StrategyChoice& choice, const ModelShape& shape, std::string_view precision,
                         World& world, const std::shared_ptr<Recorder>& recorder) {
  recorder->take();
  const auto module = std::make_shared<Transformer>(shape, c10::kCPU, recorder);
  const auto strategy = choice.make("single_device");
  strategy->setup(*module, {.devices = {c10::kCPU},
                            .precision = Precision(precision),
                            .world = world,
                            .local_world_size = world.world_size()});
  RecordedStep recorded{.events = {}, .num_params = shape.num_params()};
  recorded.element_bytes = Precision(precision).is_true_16_bit() ? 2 : 4;
  try {
    strategy->setup_optimizers(module->configure_optimizers());
    for (int s = 1; s <= kRecordedStep; ++s) {
      recorder->take();
      step(*strategy, *recorder, s - 1);
    }
    recorded.events = recorder->take();
  } catch (...) {
    strategy->teardown();
    throw;
  }
  strategy->teardown();
  recorded.shards = shards_of(recorded.events, world.world_size());
  for (const Event& event : recorded.events) recorded.num_updates += event.kind == Event::Kind::update ? 1 : 0;
  return recorded;
}

RecordedStep record_step(const StrategyChoice& strategy, const ModelShape& shape, std::string_view precision,
                         int64_t world_size) {
  const auto recorder = std::make_shared<Recorder>(/*lazily=*/true);
  World world(std::make_shared<RecordingCollective>(recorder, Scope::world, 0, world_size),
              std::make_shared<RecordingCollective>(recorder, Scope::control, 0, world_size));
  return record_step(strategy, shape, precision, world, recorder);
}

ModelMemory memory_of(const StrategyChoice& strategy, const ModelShape& shape, std::string_view precision,
                      int64_t world_size, int64_t num_hosts) {
  const auto module = std::make_shared<Transformer>(shape, c10::kMeta, nullptr);
  return estimate_memory(*module, strategy, world_size, precision, module->configure_optimizers(), c10::kCUDA,
                         /*accumulate_grad_batches=*/1, num_hosts);
}

}  // namespace fulgur::scaling
