#include "strategies/flat_strategy.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "core/module_state.h"
#include "distributed/exchange.h"
#include "nn/sync_batch_norm.h"
#include "optim/fused_update.h"

namespace fulgur {
namespace {

// One factor for the mean over micro-batches, the loss scale and the clipping of the norm, computed in fp64 where the
// gradients are, so that nothing waits for the device. `unscale` is the factor that undoes the loss scale.
GradientTransform transform_for(const Optimizer& optimizer, const StepRequest& request, double unscale) {
  GradientTransform transform;
  const double mean = unscale / static_cast<double>(request.micro_batches);
  const GradientClipping& clipping = request.clipping;
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::norm) {
    transform.factor = clip_coefficient(gradient_norm(optimizer.params()).mul(mean), clipping.value).mul(mean);
  } else if (mean != 1.0) {
    transform.factor =
        at::scalar_tensor(mean, at::device(optimizer.groups().front().params.front().device()).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

// So that the gradients of further micro-batches are added in fp32. The first one's stay as they are: a step of one
// micro-batch pays nothing.
void widen_gradients(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (grad.defined() && optim::is_16_bit(grad.scalar_type())) param.mutable_grad() = grad.to(at::kFloat);
  }
}

int64_t to_bytes(double mib) { return static_cast<int64_t>(mib * (1 << 20)); }

// Throws on every rank, with the first line that differs from rank 0's. `what` the lines are, in the plural.
void check_same_lines(const std::vector<std::string>& lines, Collective& control, std::string_view what) {
  const std::vector<std::string> by_rank = all_gather_bytes(control, fmt::format("{}", fmt::join(lines, "\n")));
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] == by_rank[0]) continue;
    std::istringstream ours(by_rank[0]), theirs(by_rank[rank]);
    std::string our_line, their_line;
    while (our_line == their_line) {
      if (!std::getline(ours, our_line)) our_line = "nothing further";
      if (!std::getline(theirs, their_line)) their_line = "nothing further";
    }
    throw SetupError(
        fmt::format("the {} differ between ranks: rank 0 has {}, rank {} has {}; build the same on every "
                    "rank, whatever its number",
                    what, our_line, rank, their_line));
  }
}

// The same parameters and buffers on every rank: those of rank 0.
void make_equal(const Module& module, World& world) {
  std::vector<std::string> lines;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named_state(module)) {
    lines.push_back(c10::str("'", name, "' of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type()));
    tensors.push_back(tensor);
  }
  check_same_lines(lines, world.control(), "parameters and buffers");
  broadcast_tensors(world.data(), tensors, /*root=*/0);
}

void check_same_buckets(const FlatParameters& parameters, Collective& control) {
  std::vector<std::string> lines;
  for (const auto& bucket : parameters.buckets()) {
    for (const auto& slot : bucket.slots) {
      lines.push_back(fmt::format("'{}' in group {} of optimizer {}", slot.name, bucket.group, bucket.optimizer));
    }
  }
  check_same_lines(lines, control, "trainable parameters");
}

}  // namespace

void Ddp::describe(FieldVisitor& visit) {
  visit({.name = "bucket_cap_mib", .help = "gradients that are reduced together, MiB", .min = 0}, &bucket_cap_mib);
  visit({.name = "first_bucket_mib", .help = "of the first ones in backward, MiB", .min = 0}, &first_bucket_mib);
  visit({.name = "broadcast_buffers", .help = "buffers are those of rank 0 after each step"}, &broadcast_buffers);
  visit({.name = "timeout_s", .help = "until ranks that do not answer are given up, s", .min = 1}, &timeout_s);
  visit({.name = "connect_timeout_s", .help = "until every rank has come, s", .min = 1}, &connect_timeout_s);
}

void FlatStrategy::describe(FieldVisitor& visit) {
  if (ddp_) ddp_->describe(visit);
}

void FlatStrategy::check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const {
  if (ddp_ || (devices.size() == 1 && num_nodes == 1)) return;
  throw UsageError(fmt::format(
      "strategy 'single_device' trains on one device, but devices = {} and num_nodes = {}; set both to 1 or "
      "write strategy = 'ddp'",
      devices.size(), num_nodes));
}

std::optional<WorldOptions> FlatStrategy::rank_per_device() const {
  if (!ddp_) return std::nullopt;
  return WorldOptions{.timeout_s = ddp_->timeout_s, .connect_timeout_s = ddp_->connect_timeout_s};
}

void FlatStrategy::setup(Module& module, const StrategySetup& setup) {
  module_ = &module;
  world_ = &setup.world;
  deterministic_ = setup.deterministic;
  precision_ = setup.precision;
  converted_.emplace(module, precision_);
  device_ = setup.devices.front();
  current_device_.emplace(device_);
  module.to(device_);
  if (alone()) return;
  make_equal(module, *world_);
  nn::attach_sync_batch_norm(module, device_.is_cpu() ? &world_->control() : &world_->data());
  if (!ddp_->broadcast_buffers) return;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) buffers_.push_back(buffer);
  }
}

void FlatStrategy::setup_optimizers(Optimizers optimizers) {
  optimizers_ = std::move(optimizers);
  flatten();
  has_16_bit_params_ = std::ranges::any_of(flat_->buckets(), [](const FlatParameters::Bucket& bucket) {
    return optim::is_16_bit(bucket.flat.scalar_type());
  });
  if (!precision_.needs_loss_scale()) return;
  for (const auto& optimizer : optimizers_) {
    if (!optimizer->needs_closure()) continue;
    throw UsageError(
        fmt::format("{} evaluates the loss several times in a step, which does not go with the loss scale "
                    "of precision '{}'; use 'bf16-mixed' or '32'",
                    optimizer->name(), precision_.name()));
  }
  loss_scaling_.emplace(optimizers_.size());
}

void FlatStrategy::flatten() {
  reducer_.reset();
  flat_.reset();
  BucketOptions buckets;
  if (ddp_) {
    buckets = {.first_bucket_bytes = to_bytes(ddp_->first_bucket_mib),
               .bucket_cap_bytes = to_bytes(ddp_->bucket_cap_mib),
               .world_size = world_->world_size()};
  }
  flat_.emplace(*module_, optimizers_, buckets);
  if (alone()) return;
  check_same_buckets(*flat_, world_->control());
  reducer_.emplace(*flat_, world_->data(), world_->control(), ReduceOptions{.rank_order = deterministic_});
}

// A parameter was frozen or unfrozen, or a group was added.
void FlatStrategy::rebuild_if_changed() {
  if (!flat_->are_those_of(optimizers_)) flatten();
}

at::Tensor FlatStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  const PrecisionScope scope(precision_, device_.type());
  return module_->training_step(batch, batch_idx);
}

Batch FlatStrategy::to_device(const Batch& batch) {
  return module_->transfer_batch_to_device(precision_.convert(batch), device_);
}

void FlatStrategy::zero_grad(size_t optimizer) {
  rebuild_if_changed();
  optimizers_[optimizer].zero_grad();
  if (loss_scaling_) loss_scaling_->zeroed(optimizer);
}

void FlatStrategy::backward(const at::Tensor& loss, bool is_last) {
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (has_16_bit_params_) {
    for (const auto& optimizer : optimizers_) widen_gradients(optimizer->params());
  }
  if (reducer_ && is_last) reducer_->begin();
  module_->backward(loss_scaling_ ? loss_scaling_->scale(loss) : loss);
}

Window FlatStrategy::end_window(const Window& mine) {
  if (!reducer_) return mine;
  if (mine.micro_batches == 0) {  // those of the last step are still there
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  std::vector<double> message{static_cast<double>(mine.micro_batches), mine.wants_stop ? 1.0 : 0.0,
                              mine.ends_epoch ? 1.0 : 0.0};
  reducer_->finish(message);
  broadcast_buffers();
  return {
      .micro_batches = static_cast<int64_t>(message[0]), .wants_stop = message[1] > 0, .ends_epoch = message[2] > 0};
}

void FlatStrategy::manual_backward(const at::Tensor& loss) {
  if (!reducer_) return backward(loss, /*is_last=*/false);
  rebuild_if_changed();
  std::vector<std::pair<at::Tensor, at::Tensor>> earlier;  // copies: gradients of the last backward lie in the buckets
  std::vector<at::Tensor> params;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& param : optimizer->params()) {
      params.push_back(param);
      const at::Tensor grad = std::exchange(param.mutable_grad(), {});
      if (grad.defined()) earlier.emplace_back(param, grad.clone());
    }
  }
  backward(loss, /*is_last=*/true);
  std::vector<double> nothing;
  reducer_->finish(nothing);
  scale_gradients(params, at::scalar_tensor(1.0 / static_cast<double>(world_->world_size()), at::kDouble));
  for (const auto& [param, grad] : earlier) {
    param.mutable_grad() = param.grad().defined() ? grad.add(param.grad()) : grad;
  }
  broadcast_buffers();
}

void FlatStrategy::broadcast_buffers() {
  if (!buffers_.empty()) broadcast_tensors(world_->data(), buffers_, /*root=*/0);
}

StepReport FlatStrategy::optimizer_step(size_t index, const StepRequest& request) {
  const OutsidePrecisionScope outside(precision_, device_.type());
  rebuild_if_changed();
  flat_->check_in_place();
  if (loss_scaling_) return scaled_step(index, request);
  Optimizer& optimizer = optimizers_[index];
  if (optimizer.needs_closure()) {
    optimizer.step(request.closure);
  } else {
    optimizer.step(transform_for(optimizer, request, /*unscale=*/1.0));
  }
  return {};
}

StepReport FlatStrategy::scaled_step(size_t index, const StepRequest& request) {
  Optimizer& optimizer = optimizers_[index];
  const StepReport report{.skipped = loss_scaling_->is_non_finite(index, optimizer.params()),
                          .loss_scale = loss_scaling_->loss_scale()};
  if (!report.skipped) optimizer.step(transform_for(optimizer, request, loss_scaling_->factor(index)));
  loss_scaling_->stepped(index);
  return report;
}

void FlatStrategy::materialize_gradients(size_t index, int64_t micro_batches) {
  const std::vector<at::Tensor> params = optimizers_[index].params();
  double factor = 1.0 / static_cast<double>(micro_batches);
  if (loss_scaling_) {
    loss_scaling_->is_non_finite(index, params);  // before a hook can hide it
    factor *= loss_scaling_->factor(index);
    loss_scaling_->unscaled(index);
  }
  if (factor != 1.0) scale_gradients(params, at::scalar_tensor(factor, at::kDouble));
}

std::vector<std::pair<std::string, at::Tensor>> FlatStrategy::module_state() const {
  TORCH_CHECK(module_ != nullptr, name(), ": there is no module before setup");
  return named_state(*module_);
}

void FlatStrategy::teardown() noexcept {
  reducer_.reset();
  flat_.reset();
  buffers_.clear();
  optimizers_ = {};
  loss_scaling_.reset();
  Module* module = std::exchange(module_, nullptr);
  if (module == nullptr) return;
  nn::attach_sync_batch_norm(*module, nullptr);
  try {
    if (!device_.is_cpu()) module->zero_grad();  // Module::to leaves gradients behind
    module->to(c10::kCPU);
    if (converted_) converted_->give_back();
    current_device_.reset();
  } catch (const std::exception& error) {
    log_warning("the module could not be brought back to the CPU: {}", error.what());
  }
}

}  // namespace fulgur
