#include "strategies/flat_strategy.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "core/module_state.h"
#include "core/names.h"
#include "distributed/exchange.h"
#include "nn/sync_batch_norm.h"
#include "optim/fused_update.h"
#include "strategies/rank_agreement.h"

namespace fulgur {
namespace {

// So that the gradients of further micro-batches are added in fp32. The first one's stay as they are: a step of one
// micro-batch pays nothing.
void widen_gradients(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (grad.defined() && optim::is_16_bit(grad.scalar_type())) param.mutable_grad() = grad.to(at::kFloat);
  }
}

int64_t to_bytes(double mib) { return static_cast<int64_t>(mib * (1 << 20)); }

}  // namespace

std::string FlatStrategy::name() const {
  return std::visit([](const auto& preset) { return std::string(preset.kName); }, preset_);
}

void FlatStrategy::describe(FieldVisitor& visit) {
  std::visit([&](auto& preset) { preset.describe(visit); }, preset_);
}

std::optional<FlatStrategy::RankOptions> FlatStrategy::rank_options() const {
  const auto of = [](const auto& preset) {
    return RankOptions{.buckets = {.first_bucket_bytes = to_bytes(preset.first_bucket_mib),
                                   .bucket_cap_bytes = to_bytes(preset.bucket_cap_mib)},
                       .broadcast_buffers = preset.broadcast_buffers,
                       .world = {.timeout_s = preset.timeout_s, .connect_timeout_s = preset.connect_timeout_s}};
  };
  if (const auto* ddp = std::get_if<Ddp>(&preset_)) return of(*ddp);
  const auto* sharded = std::get_if<DdpSharded>(&preset_);
  if (sharded == nullptr) return std::nullopt;
  RankOptions options = of(*sharded);
  options.shard = true;
  options.each_micro_batch = sharded->stage == 2 && canonical_name(sharded->reduce) == "each_micro_batch";
  return options;
}

void FlatStrategy::check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const {
  if (rank_options() || (devices.size() == 1 && num_nodes == 1)) return;
  if (std::holds_alternative<Dp>(preset_)) {
    if (num_nodes == 1) return;
    throw UsageError(
        fmt::format("strategy 'dp' is one process on one machine, but num_nodes = {}; set it to 1 or write "
                    "strategy = 'ddp'",
                    num_nodes));
  }
  throw UsageError(fmt::format(
      "strategy 'single_device' trains on one device, but devices = {} and num_nodes = {}; set both to 1 or "
      "write strategy = 'ddp'",
      devices.size(), num_nodes));
}

std::optional<WorldOptions> FlatStrategy::rank_per_device() const {
  const auto options = rank_options();
  return options ? std::optional(options->world) : std::nullopt;
}

void FlatStrategy::setup(Module& module, const StrategySetup& setup) {
  module_ = &module;
  world_ = &setup.world;
  deterministic_ = setup.deterministic;
  precision_ = setup.precision;
  converted_.emplace(module, precision_);
  devices_ = setup.devices;
  device_ = devices_.front();
  current_device_.emplace(device_);
  module.to(device_);
  if (alone() && std::holds_alternative<DdpSharded>(preset_)) log_info("ddp_sharded with one rank saves no memory");
  if (alone()) return;
  make_equal(module, *world_);
  nn::attach_sync_batch_norm(module, device_.is_cpu() ? &world_->control() : &world_->data());
  if (!rank_options()->broadcast_buffers) return;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) buffers_.push_back(buffer);
  }
}

void FlatStrategy::setup_optimizers(Optimizers optimizers) {
  optimizers_ = std::move(optimizers);
  if (!alone() && rank_options()->shard && !module_->automatic_optimization) {
    throw SetupError(
        fmt::format("{} optimises manually, but strategy '{}' has the gradients of a step only in parts; use "
                    "'ddp', or leave automatic_optimization true",
                    module_->name(), name()));
  }
  flatten();
  has_16_bit_params_ = std::ranges::any_of(flat_->buckets(), [](const FlatParameters::Bucket& bucket) {
    return optim::is_16_bit(bucket.flat.scalar_type());
  });
  if (devices_.size() > 1) replicas_.emplace(*module_, devices_);
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
  flat_.emplace(*module_, optimizers_, bucket_options(world_->world_size()));
  if (alone()) return;
  const auto ranks = rank_options();
  check_same_buckets(*flat_, world_->control());
  reducer_.emplace(*flat_, world_->data(), world_->control(),
                   ReduceOptions{.shard = ranks->shard, .rank_order = deterministic_});
  if (!ranks->shard) return;
  shard_.emplace(*flat_, optimizers_, world_->rank(), world_->world_size());
  are_gathered_.assign(optimizers_.size(), false);
  window_is_open_ = false;
}

BucketOptions FlatStrategy::bucket_options(int64_t world_size) const {
  const auto ranks = rank_options();
  BucketOptions buckets = ranks ? ranks->buckets : BucketOptions();
  buckets.world_size = world_size;
  return buckets;
}

// A parameter was frozen or unfrozen, or a group was added.
void FlatStrategy::rebuild_if_changed() {
  if (flat_->are_those_of(optimizers_)) return;
  const auto states = shards() ? shard_->gather_all(world_->data()) : OptimizerShard::States();
  shard_.reset();
  flatten();
  if (shards()) shard_->set_all(states);
}

void FlatStrategy::check_unchanged() const {
  TORCH_CHECK(flat_->are_those_of(optimizers_),
              "a parameter was frozen, unfrozen or added between the micro-batches of "
              "a step, whose gradients are on their way to other ranks; do it in on_train_epoch_start or "
              "on_train_batch_start of a step's first batch");
}

at::Tensor FlatStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  const PrecisionScope scope(precision_, device_.type());
  return replicas_ ? replicas_->training_step(batch, batch_idx) : module_->training_step(batch, batch_idx);
}

Batch FlatStrategy::to_device(const Batch& batch) {
  return module_->transfer_batch_to_device(precision_.convert(batch), device_);
}

void FlatStrategy::zero_grad(size_t optimizer) {
  if (!window_is_open_) rebuild_if_changed();
  optimizers_[optimizer].zero_grad();
  if (loss_scaling_) loss_scaling_->zeroed(optimizer);
}

void FlatStrategy::backward(const at::Tensor& loss, bool is_last) {
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (has_16_bit_params_) {
    for (const auto& optimizer : optimizers_) widen_gradients(optimizer->params());
  }
  if (shards()) open_window();
  if (reducer_ && (is_last || (shards() && rank_options()->each_micro_batch))) reducer_->begin();
  module_->backward(loss_scaling_ ? loss_scaling_->scale(loss) : loss);
  if (replicas_) replicas_->backward();
}

// What is left of the last window's sums is dropped.
void FlatStrategy::open_window() {
  if (std::exchange(window_is_open_, true)) return;
  reducer_->clear();
  are_gathered_.assign(optimizers_.size(), false);
}

Window FlatStrategy::end_micro_batch(const Window& mine, bool is_last) {
  if (!reducer_ || (!is_last && !(shards() && rank_options()->each_micro_batch))) return mine;
  if (mine.micro_batches == 0) {  // gradients of the last step are still there
    if (!window_is_open_) rebuild_if_changed();
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  if (shards()) {
    open_window();
    check_unchanged();
  }
  std::vector<double> message{static_cast<double>(mine.micro_batches), mine.wants_stop ? 1.0 : 0.0,
                              mine.ends_epoch ? 1.0 : 0.0};
  reducer_->finish(message);
  const Window all{
      .micro_batches = static_cast<int64_t>(message[0]), .wants_stop = message[1] > 0, .ends_epoch = message[2] > 0};
  if (is_last || all.ends_epoch) {
    window_is_open_ = false;
    broadcast_buffers();
  }
  return all;
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
  if (shards()) {
    check_unchanged();
    if (are_gathered_[index]) take_gathered_gradients(index);
  } else {
    rebuild_if_changed();
  }
  flat_->check_in_place();
  if (loss_scaling_) return scaled_step(index, request);
  if (optimizers_[index].needs_closure()) {
    optimizers_[index].step(request.closure);
  } else {
    update(index, transform_for(index, request, /*unscale=*/1.0));
  }
  return {};
}

StepReport FlatStrategy::scaled_step(size_t index, const StepRequest& request) {
  const StepReport report{.skipped = loss_scaling_->is_non_finite(index, [&] { return any_non_finite(index); }),
                          .loss_scale = loss_scaling_->loss_scale()};
  if (!report.skipped) update(index, transform_for(index, request, loss_scaling_->factor(index)));
  loss_scaling_->stepped(index);
  return report;
}

void FlatStrategy::update(size_t index, const GradientTransform& transform) {
  shards() ? update_shard(index, transform) : optimizers_[index].step(transform);
}

// In the order of forward, which is the reverse of buckets: a range is gathered while the next is updated.
void FlatStrategy::update_shard(size_t index, const GradientTransform& transform) {
  std::vector<Work> gathering;
  for (size_t b = flat_->buckets().size(); b-- > 0;) {
    const FlatParameters::Bucket& bucket = flat_->buckets()[b];
    if (bucket.optimizer != index || std::ranges::all_of(reducer_->used(b), [](double used) { return used == 0; })) {
      continue;
    }
    shard_->update(b, reducer_->owned(b), reducer_->used(b), transform);
    gathering.push_back(world_->data().all_gather(bucket.flat));
    for (const auto& slot : bucket.slots) slot.param.unsafeGetTensorImpl()->bump_version();  // autograd notices
  }
  for (Work& work : gathering) work.wait();
}

// One factor for the mean over micro-batches, the loss scale and the clipping of the norm, computed in fp64 where the
// gradients are, so that nothing waits for the device. `unscale` is the factor that undoes the loss scale.
GradientTransform FlatStrategy::transform_for(size_t index, const StepRequest& request, double unscale) {
  GradientTransform transform;
  const double mean = unscale / static_cast<double>(request.micro_batches);
  const GradientClipping& clipping = request.clipping;
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::norm) {
    at::Tensor norm = joint_norm(gradients_here(index));
    if (shards()) {
      const at::Tensor squares = norm.square().reshape({1});
      world_->control().all_reduce(squares).wait();
      norm = squares.sqrt().squeeze();
    }
    transform.factor = clip_coefficient(norm.mul(mean), clipping.value).mul(mean);
  } else if (mean != 1.0) {
    transform.factor = at::scalar_tensor(mean, at::device(device_).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

// The summed gradients of an optimizer that this rank has: all of them, or its ranges.
std::vector<at::Tensor> FlatStrategy::gradients_here(size_t index) const {
  std::vector<at::Tensor> gradients;
  if (!shards()) {
    for (const at::Tensor& param : optimizers_[index].params()) {
      if (param.grad().defined()) gradients.push_back(param.grad());
    }
    return gradients;
  }
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const at::Tensor owned = reducer_->owned(b);
    if (flat_->buckets()[b].optimizer == index && owned.defined()) gradients.push_back(owned);
  }
  return gradients;
}

bool FlatStrategy::any_non_finite(size_t index) {
  const bool here = optim::any_non_finite(gradients_here(index));
  if (!shards()) return here;  // every rank has the same
  GroupRanks ranks(world_->control());
  return any_rank(ranks, here);
}

void FlatStrategy::materialize_gradients(size_t index, int64_t micro_batches) {
  double factor = 1.0 / static_cast<double>(micro_batches);
  if (loss_scaling_) {
    loss_scaling_->is_non_finite(index, [&] { return any_non_finite(index); });  // before a hook can hide it
    factor *= loss_scaling_->factor(index);
    loss_scaling_->unscaled(index);
  }
  if (shards()) gather_gradients(index);
  if (factor != 1.0) scale_gradients(optimizers_[index].params(), at::scalar_tensor(factor, at::kDouble));
}

// For a hook that wants to see gradients: whole ones, on every rank.
void FlatStrategy::gather_gradients(size_t index) {
  const c10::NoGradGuard no_grad;
  int64_t num_bytes = 0;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = flat_->buckets()[b];
    const at::Tensor owned = reducer_->owned(b);
    if (bucket.optimizer != index || std::ranges::all_of(reducer_->used(b), [](double used) { return used == 0; })) {
      continue;
    }
    const at::Tensor whole = at::zeros({bucket.flat.numel()}, owned.options());
    shard_->range(b).of(whole).copy_(owned);
    world_->data().all_gather(whole).wait();
    num_bytes += static_cast<int64_t>(whole.nbytes());
    for (size_t s = 0; s < bucket.slots.size(); ++s) {
      const auto& slot = bucket.slots[s];
      if (reducer_->used(b)[s] == 0) continue;
      slot.param.mutable_grad() = whole.as_strided(slot.param.sizes(), slot.param.strides(), slot.begin);
    }
  }
  are_gathered_[index] = true;
  if (std::exchange(told_gathered_, true)) return;
  log_warning(
      "a hook looks at the gradients before each step, so that every rank gathers {:.1f} MB of them, which {} "
      "otherwise never holds",
      static_cast<double>(num_bytes) / 1e6, name());
}

// What the hook has made of them.
void FlatStrategy::take_gathered_gradients(size_t index) {
  const c10::NoGradGuard no_grad;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = flat_->buckets()[b];
    if (bucket.optimizer != index) continue;
    for (const Piece& piece : pieces_in(bucket, shard_->range(b))) {
      const at::Tensor& param = bucket.slots[piece.slot].param;
      if (!param.grad().defined()) continue;
      const at::Tensor in_order = at::empty_like(param, param.grad().options()).copy_(param.grad());
      reducer_->owned(b)
          .narrow(0, piece.offset, piece.num_elements)
          .copy_(in_order.as_strided({param.numel()}, {1}).narrow(0, piece.begin, piece.num_elements));
    }
  }
  optimizers_[index].zero_grad();
  are_gathered_[index] = false;
}

// Source of the formulas: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
std::optional<ModelMemory> FlatStrategy::model_memory(const Module& module, const Optimizers& optimizers,
                                                      const Precision& precision, int64_t num_devices,
                                                      c10::DeviceType device_type) const {
  const auto ranks = rank_options();
  const int64_t world_size = ranks ? num_devices : 1;
  const int64_t shards = ranks && ranks->shard ? world_size : 1;
  const auto buckets = FlatParameters::plan(module, optimizers, bucket_options(world_size), precision.true_dtype());
  ModelMemory memory;
  std::unordered_set<const c10::TensorImpl*> counted;
  int64_t pooled = 0, previous = 0;  // GradientReducer's memory of two buckets on their way
  for (const FlatParameters::Bucket& bucket : buckets) {
    for (const auto& slot : bucket.slots) counted.insert(slot.param.unsafeGetTensorImpl());
    const c10::ScalarType dtype = precision.true_dtype().value_or(bucket.slots.front().param.scalar_type());
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    memory.parameters += bucket.num_bytes;
    memory.gradients += bucket.num_bytes / shards;
    pooled = std::max(pooled, previous + bucket.num_bytes);
    previous = bucket.num_bytes;
    const Optimizer& optimizer = optimizers[bucket.optimizer];
    const std::optional<int64_t> numbers = optimizer.state_numbers();
    const int64_t masters = optim::is_16_bit(dtype) && optimizer.element_wise() ? 1 : 0;
    if (!numbers || !memory.optimizer_state) {
      memory.optimizer_state.reset();
    } else {
      *memory.optimizer_state +=
          (*numbers + masters) * std::max<int64_t>(4, element_size) * (bucket.num_bytes / element_size / shards);
    }
  }
  if (std::holds_alternative<Dp>(preset_) && device_type == c10::kCPU)
    memory.gradients *= num_devices;  // in one memory
  if (shards > 1) memory.buckets = pooled;
  for (const at::Tensor& param : module.parameters()) {
    if (!counted.insert(param.unsafeGetTensorImpl()).second) continue;
    const auto dtype =
        precision.true_dtype() && param.is_floating_point() ? *precision.true_dtype() : param.scalar_type();
    memory.parameters += param.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return memory;
}

std::vector<std::pair<std::string, at::Tensor>> FlatStrategy::module_state() const {
  TORCH_CHECK(module_ != nullptr, name(), ": there is no module before setup");
  return named_state(*module_);
}

void FlatStrategy::teardown() noexcept {
  shard_.reset();
  replicas_.reset();
  reducer_.reset();
  flat_.reset();
  buffers_.clear();
  window_is_open_ = told_gathered_ = false;
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
