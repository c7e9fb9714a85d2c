#include "strategies/flat_strategy.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "core/logging.h"
#include "core/module_state.h"
#include "core/names.h"
#include "core/trace.h"
#include "distributed/exchange.h"
#include "nn/sync_batch_norm.h"
#include "optim/fused_update.h"
#include "strategies/rank_agreement.h"
#include "strategies/saved_optimizers.h"

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

void check_base(std::string_view base) {
  const std::string name = canonical_name(base);
  if (name == Dp::kName) {
    throw UsageError(
        "strategy 'delayed_update' does not go over 'dp': its replicas read the weights while the next step computes, "
        "which a late update would have to change; use base 'ddp'");
  }
  const std::vector<std::string> known{"ddp", "ddp_sharded", "single_device", "zero_offload"};
  if (std::ranges::find(known, name) == known.end())
    throw UsageError(unknown_name_message("base of strategy 'delayed_update'", base, known));
}

}  // namespace

std::string FlatStrategy::name() const {
  return std::visit([](const auto& preset) { return std::string(preset.kName); }, preset_);
}

void FlatStrategy::describe(FieldVisitor& visit) {
  std::visit([&](auto& preset) { preset.describe(visit); }, preset_);
}

FlatStrategy::Engine FlatStrategy::engine() const {
  const auto with_ranks = [](const auto& preset) {
    return Engine{.world = WorldOptions{.timeout_s = preset.timeout_s, .connect_timeout_s = preset.connect_timeout_s},
                  .buckets = {.first_bucket_bytes = to_bytes(preset.first_bucket_mib),
                              .bucket_cap_bytes = to_bytes(preset.bucket_cap_mib)},
                  .broadcast_buffers = preset.broadcast_buffers};
  };
  const auto sharded = [&](const auto& preset) {
    Engine engine = with_ranks(preset);
    engine.shard = true;
    engine.each_micro_batch = canonical_name(preset.reduce) == "each_micro_batch";
    return engine;
  };
  const auto offload = [&](const auto& preset) {
    Engine engine = sharded(preset);
    engine.host_ratio = preset.ratio;
    engine.update_threads = preset.update_threads;
    return engine;
  };
  if (const auto* ddp = std::get_if<Ddp>(&preset_)) return with_ranks(*ddp);
  if (const auto* preset = std::get_if<DdpSharded>(&preset_)) {
    Engine engine = sharded(*preset);
    engine.each_micro_batch = engine.each_micro_batch && preset->stage == 2;
    return engine;
  }
  if (const auto* preset = std::get_if<ZeroOffload>(&preset_)) return offload(*preset);
  const auto* delayed = std::get_if<DelayedUpdate>(&preset_);
  if (delayed == nullptr) return {};
  const std::string base = canonical_name(delayed->base);
  Engine engine = base == ZeroOffload::kName  ? offload(*delayed)
                  : base == DdpSharded::kName ? sharded(*delayed)
                                              : with_ranks(*delayed);
  if (base == SingleDevice::kName) engine.world.reset();
  engine.update_threads = delayed->update_threads;
  engine.delayed = true;
  engine.warmup_steps = delayed->warmup_steps;
  return engine;
}

void FlatStrategy::check_devices(const std::vector<c10::Device>& devices, int64_t num_nodes) const {
  if (const auto* delayed = std::get_if<DelayedUpdate>(&preset_)) check_base(delayed->base);
  if (engine().world || (devices.size() == 1 && num_nodes == 1)) return;
  if (std::holds_alternative<Dp>(preset_)) {
    if (num_nodes == 1) return;
    throw UsageError(
        fmt::format("strategy 'dp' is one process on one machine, but num_nodes = {}; set it to 1 or write "
                    "strategy = 'ddp'",
                    num_nodes));
  }
  const bool is_base = std::holds_alternative<DelayedUpdate>(preset_);
  throw UsageError(
      fmt::format("strategy '{}' trains on one device, but devices = {} and num_nodes = {}; set both to 1 or write "
                  "{} = 'ddp'",
                  is_base ? "delayed_update' over 'single_device" : "single_device", devices.size(), num_nodes,
                  is_base ? "strategy.base" : "strategy"));
}

std::optional<WorldOptions> FlatStrategy::rank_per_device() const { return engine().world; }

void FlatStrategy::setup(Module& module, const StrategySetup& setup) {
  module_ = &module;
  world_ = &setup.world;
  deterministic_ = setup.deterministic;
  local_world_size_ = setup.local_world_size;
  sends_ahead_ = setup.sends_ahead;
  resting_states_.clear();
  precision_ = setup.precision;
  converted_.emplace(module, precision_);
  devices_ = setup.devices;
  device_ = devices_.front();
  current_device_.emplace(device_);
  module.to(device_);
  num_steps_ = 0;
  if (alone() && std::holds_alternative<DdpSharded>(preset_)) log_info("ddp_sharded with one rank saves no memory");
  if (engine().host_ratio > 0 && device_.is_cpu()) {
    log_info("{} on a CPU saves no memory: parameters and state are in the same one", name());
  }
  if (alone()) return;
  make_equal(module, *world_);
  nn::attach_sync_batch_norm(module, device_.is_cpu() ? &world_->control() : &world_->data());
  if (!engine().broadcast_buffers) return;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) buffers_.push_back(buffer);
  }
}

void FlatStrategy::setup_optimizers(Optimizers optimizers) {
  optimizers_ = std::move(optimizers);
  if (wants_sums() && !module_->automatic_optimization) {
    throw SetupError(
        fmt::format("{} optimises manually, but strategy '{}' keeps the gradients of a step apart from the parameters; "
                    "use 'ddp', or leave automatic_optimization true",
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

// Whether sums of gradients are kept apart from the parameters, in the ranges that this rank updates.
bool FlatStrategy::wants_sums() const {
  const Engine engine = this->engine();
  return (engine.shard && !alone()) || engine.host_ratio > 0 || engine.delayed;
}

void FlatStrategy::flatten() {
  schedule_.reset();
  reducer_.reset();
  keeper_.reset();
  shard_.reset();
  flat_.reset();
  flat_.emplace(*module_, optimizers_, bucket_options(world_->world_size()));
  if (!alone()) check_same_buckets(*flat_, world_->control());
  const Engine engine = this->engine();
  ReduceOptions reduce{.shard = engine.shard, .rank_order = deterministic_};
  if (wants_sums()) {
    const bool has_workers = engine.host_ratio > 0 || (engine.delayed && device_.is_cpu());
    shard_.emplace(*flat_, optimizers_,
                   ShardOptions{.rank = engine.shard ? world_->rank() : 0,
                                .world_size = engine.shard ? world_->world_size() : 1,
                                .host_ratio = engine.host_ratio,
                                .copies = engine.delayed,
                                .num_workers = has_workers ? num_update_threads() : 0,
                                .gradient_sums = engine.delayed ? 2 : 1,
                                .ranks_on_host = local_world_size_});
    if (engine.host_ratio > 0) keeper_ = std::make_unique<SideWorker>(device_, SideWorkerOptions{.one_thread = true});
    reduce.make_sums = [this](size_t bucket) { return shard_->make_sums(bucket); };
    reduce.keeper = keeper_.get();
  } else if (alone()) {
    return;
  }
  reducer_.emplace(*flat_, world_->data(), world_->control(), reduce);
  if (!shard_) return;
  schedule_ = std::make_unique<UpdateSchedule>(*flat_, optimizers_, *shard_, *reducer_, world_->data(), device_,
                                               shard_->num_workers());
  are_gathered_.assign(optimizers_.size(), false);
  window_is_open_ = false;
}

int64_t FlatStrategy::num_update_threads() const {
  const int64_t wanted = engine().update_threads;
  const auto cores = static_cast<int64_t>(cores_of_process().size());
  const int64_t number = wanted > 0 ? wanted : std::max<int64_t>(1, cores / local_world_size_);
  log_info("{}: {} thread{} a rank for the update", name(), number, number == 1 ? "" : "s");
  return number;
}

BucketOptions FlatStrategy::bucket_options(int64_t world_size) const {
  BucketOptions buckets = engine().buckets;
  buckets.world_size = world_size;
  return buckets;
}

// A parameter was frozen or unfrozen, or a group was added.
void FlatStrategy::rebuild_if_changed() {
  if (flat_->are_those_of(optimizers_)) return;
  TORCH_CHECK(!schedule_ || !schedule_->is_late(),
              "a parameter was frozen, unfrozen or added while a step with a late update was running; do it in "
              "on_train_epoch_start or on_train_batch_start");
  if (keeps_sums()) {
    auto states = shard_->gather_all(engine().shard ? world_->data() : alone_);
    resting_states_.merge(states);
  }
  flatten();
  if (!keeps_sums()) return;
  shard_->set_all(resting_states_);
  for (const auto& bucket : flat_->buckets()) {
    for (const auto& slot : bucket.slots) resting_states_.erase(slot.param.unsafeGetTensorImpl());
  }
}

void FlatStrategy::check_unchanged() const {
  TORCH_CHECK(flat_->are_those_of(optimizers_),
              "a parameter was frozen, unfrozen or added between the micro-batches of "
              "a step, whose gradients are on their way to other ranks; do it in on_train_epoch_start or "
              "on_train_batch_start of a step's first batch");
}

at::Tensor FlatStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  if (schedule_ && !window_is_open_ && !flat_->are_those_of(optimizers_)) drain();  // while no graph holds parameters
  const trace::Span span("forward");
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
  const trace::Span span("backward");
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (has_16_bit_params_) {
    for (const auto& optimizer : optimizers_) widen_gradients(optimizer->params());
  }
  if (keeps_sums()) open_window();
  if (reducer_ && sends_ahead_ && (is_last || reduces_each_micro_batch())) {
    reducer_->begin(/*measures=*/is_last && wants_norms_);
    norms_are_known_ = true;
  }
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
  const trace::Span span("end of micro-batch");
  if (!reducer_ || (!is_last && !reduces_each_micro_batch())) return mine;
  if (mine.micro_batches == 0) {  // gradients of the last step are still there
    if (!window_is_open_) rebuild_if_changed();
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
  }
  if (keeps_sums()) {
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
  const trace::Span span("optimizer step");
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (keeps_sums()) {
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
  if (report.skipped) {
    drain();  // a late update is that of the step before
  } else {
    update(index, transform_for(index, request, loss_scaling_->factor(index)));
  }
  loss_scaling_->stepped(index);
  return report;
}

void FlatStrategy::update(size_t index, const GradientTransform& transform) {
  if (!schedule_) return optimizers_[index].step(transform);
  const Engine engine = this->engine();
  schedule_->step(index, transform, /*late=*/engine.delayed && num_steps_++ >= engine.warmup_steps);
}

void FlatStrategy::drain() {
  if (schedule_) schedule_->drain();
}

// One factor for the mean over micro-batches, the loss scale and the clipping of the norm, computed in fp64 where the
// gradients are, so that nothing waits for the device. `unscale` is the factor that undoes the loss scale.
GradientTransform FlatStrategy::transform_for(size_t index, const StepRequest& request, double unscale) {
  GradientTransform transform;
  const double mean = unscale / static_cast<double>(request.micro_batches);
  const GradientClipping& clipping = request.clipping;
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::norm) {
    wants_norms_ = wants_norms_ || keeps_sums();
    at::Tensor norm = norm_here(index);
    if (engine().shard && !alone()) {
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

// Over the sections on the host and on the device.
at::Tensor FlatStrategy::norm_here(size_t index) const {
  if (const auto norm = norm_taken_on_the_way(index)) return *norm;
  std::vector<at::Tensor> on_host, elsewhere;
  for (const at::Tensor& gradient : gradients_here(index)) {
    (gradient.is_cpu() ? on_host : elsewhere).push_back(gradient);
  }
  if (elsewhere.empty()) return joint_norm(on_host).to(device_);
  const at::Tensor norm = joint_norm(elsewhere);
  return on_host.empty() ? norm : norm.hypot(joint_norm(on_host).to(device_));
}

std::optional<at::Tensor> FlatStrategy::norm_taken_on_the_way(size_t index) const {
  if (!keeps_sums() || !norms_are_known_) return std::nullopt;
  std::vector<at::Tensor> norms;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    if (flat_->buckets()[b].optimizer != index) continue;
    if (reducer_->norms(b).size() != reducer_->sums(b).size()) return std::nullopt;
    for (const at::Tensor& norm : reducer_->norms(b)) norms.push_back(norm.to(device_));
  }
  if (norms.empty()) return std::nullopt;
  return at::linalg_vector_norm(at::stack(norms), 2);
}

// The summed gradients of an optimizer that this rank has: all of them, or its ranges.
std::vector<at::Tensor> FlatStrategy::gradients_here(size_t index) const {
  std::vector<at::Tensor> gradients;
  if (!keeps_sums()) {
    for (const at::Tensor& param : optimizers_[index].params()) {
      if (param.grad().defined()) gradients.push_back(param.grad());
    }
    return gradients;
  }
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    if (flat_->buckets()[b].optimizer != index) continue;
    for (const at::Tensor& sum : reducer_->sums(b)) gradients.push_back(sum);
  }
  return gradients;
}

bool FlatStrategy::any_non_finite(size_t index) {
  wants_norms_ = wants_norms_ || keeps_sums();
  const auto norm = norm_taken_on_the_way(index);
  const bool here = norm ? !std::isfinite(norm->item<double>()) : optim::any_non_finite(gradients_here(index));
  if (!engine().shard || alone()) return here;  // every rank has the same
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
  if (keeps_sums()) gather_gradients(index);
  if (factor != 1.0) scale_gradients(optimizers_[index].params(), at::scalar_tensor(factor, at::kDouble));
}

// For a hook that wants to see gradients: whole ones, on every rank.
void FlatStrategy::gather_gradients(size_t index) {
  const c10::NoGradGuard no_grad;
  int64_t num_bytes = 0;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = flat_->buckets()[b];
    if (bucket.optimizer != index || std::ranges::all_of(reducer_->used(b), [](double used) { return used == 0; })) {
      continue;
    }
    const std::vector<at::Tensor>& sums = reducer_->sums(b);
    const at::Tensor whole = at::zeros({bucket.flat.numel()}, bucket.flat.options().dtype(sums.front().scalar_type()));
    int64_t begin = shard_->range(b).begin;
    for (const at::Tensor& sum : sums) {
      whole.narrow(0, begin, sum.numel()).copy_(sum);
      begin += sum.numel();
    }
    if (engine().shard) world_->data().all_gather(whole).wait();
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
    if (bucket.optimizer != index || reducer_->sums(b).empty()) continue;
    for (size_t slot = 0; slot < bucket.slots.size(); ++slot) {
      reducer_->set_used(b, slot, bucket.slots[slot].param.grad().defined());
    }
    for (size_t s = 0; s < reducer_->sums(b).size(); ++s) {
      for (const Piece& piece : pieces_in(bucket, shard_->sections(b)[s].range)) {
        const at::Tensor& param = bucket.slots[piece.slot].param;
        if (!param.grad().defined()) continue;
        const at::Tensor in_order = at::empty_like(param, param.grad().options()).copy_(param.grad());
        reducer_->sums(b)[s]
            .narrow(0, piece.offset, piece.num_elements)
            .copy_(in_order.as_strided({param.numel()}, {1}).narrow(0, piece.begin, piece.num_elements));
      }
    }
  }
  optimizers_[index].zero_grad();
  are_gathered_[index] = false;
  norms_are_known_ = false;
}

// Source of the formulas: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.
std::optional<ModelMemory> FlatStrategy::model_memory(const Module& module, const Optimizers& optimizers,
                                                      const Precision& precision, int64_t num_devices,
                                                      c10::DeviceType device_type) const {
  if (const auto* delayed = std::get_if<DelayedUpdate>(&preset_)) check_base(delayed->base);
  const Engine engine = this->engine();
  const int64_t world_size = engine.world ? num_devices : 1;
  const int64_t shards = engine.shard ? world_size : 1;
  const bool keeps = shards > 1 || engine.host_ratio > 0 || engine.delayed;
  const auto buckets = FlatParameters::plan(module, optimizers, bucket_options(world_size), precision.true_dtype());
  ModelMemory memory;
  std::unordered_set<const c10::TensorImpl*> counted;
  std::vector<int64_t> bucket_bytes;
  for (const FlatParameters::Bucket& bucket : buckets) {
    for (const auto& slot : bucket.slots) counted.insert(slot.param.unsafeGetTensorImpl());
    const c10::ScalarType dtype = precision.true_dtype().value_or(bucket.slots.front().param.scalar_type());
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    const Optimizer& optimizer = optimizers[bucket.optimizer];
    const int64_t num_elements = bucket.num_bytes / element_size / shards;
    const int64_t on_host = OptimizerShard::elements_on_host(num_elements, engine.host_ratio);
    const int64_t gradients = element_size * (engine.delayed ? 2 : 1);
    const int64_t masters = optim::is_16_bit(dtype) && optimizer.element_wise() ? 1 : 0;
    const int64_t state = (optimizer.state_numbers().value_or(0) + masters) * std::max<int64_t>(4, element_size);
    memory.parameters += bucket.num_bytes;
    memory.gradients += gradients * num_elements;
    memory.optimizer_state = optimizer.state_numbers() && memory.optimizer_state
                                 ? std::optional(*memory.optimizer_state + state * num_elements)
                                 : std::nullopt;
    memory.copies += element_size * (engine.delayed ? num_elements : on_host);
    memory.on_host += (gradients + state + element_size) * on_host;
    bucket_bytes.push_back(bucket.num_bytes);
  }
  if (std::holds_alternative<Dp>(preset_) && device_type == c10::kCPU)
    memory.gradients *= num_devices;  // in one memory
  const bool in_host_memory = engine.host_ratio == 1 && device_type == c10::kCPU;
  const bool reduces_in_sums = shards == 1 && (engine.host_ratio == 0 || in_host_memory);
  if (keeps && !reduces_in_sums) memory.buckets = GradientReducer::pool_bytes(bucket_bytes);
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

// `pending`: the late update of delayed_update was computed, but the parameters did not show it yet. Then the state is
// that after the update, and the parameters of the update are the ranges' "next" (of 16 bits: "master", rounded).
StrategyState FlatStrategy::state() {
  TORCH_CHECK(flat_, name(), ": there is no state before setup_optimizers");
  const c10::NoGradGuard no_grad;
  const auto* delayed = std::get_if<DelayedUpdate>(&preset_);
  if (delayed != nullptr && delayed->drain_before_save) drain();
  if (schedule_) schedule_->wait();
  StrategyState state;
  State& shared = state.shared;
  shared.set("num_steps", num_steps_);
  shared.set("pending", schedule_ && schedule_->is_late());
  if (loss_scaling_) {
    shared.set("loss_scale/scale", loss_scaling_->state().scale);
    shared.set("loss_scale/growth_tracker", loss_scaling_->state().growth_tracker);
  }
  save_optimizers(*module_, optimizers_, shared);
  shard_ ? add_shard_state(state) : add_own_state(state);
  return state;
}

// Also where every rank has the state of all of a bucket, each writes its range.
ElementRange FlatStrategy::written_range(size_t bucket) const {
  return rank_range(flat_->buckets()[bucket].flat.numel(), world_->rank(), world_->world_size());
}

void FlatStrategy::add_shard_state(StrategyState& state) const {
  std::unordered_map<const c10::TensorImpl*, int64_t> updates_of;  // parameters in buckets
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    auto ranges = shard_->state_ranges(b, written_range(b), schedule_->is_late(), schedule_->updates(b));
    std::ranges::move(ranges, std::back_inserter(state.ranges));
    const at::Tensor num_updates = at::tensor(shard_->num_updates(b), at::kLong);
    if (!alone()) world_->control().all_reduce(num_updates, ReduceOp::max).wait();
    const auto& slots = flat_->buckets()[b].slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      updates_of[slots[s].param.unsafeGetTensorImpl()] = num_updates.const_data_ptr<int64_t>()[s];
    }
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    const auto updates = updates_of.find(trained.param.unsafeGetTensorImpl());
    if (updates != updates_of.end()) {
      save_num_updates(state.shared, trained, updates->second);
      continue;
    }
    const auto resting = resting_states_.find(trained.param.unsafeGetTensorImpl());
    const int64_t size = trained.param.numel();
    if (resting == resting_states_.end() || resting->second.num_updates == 0 || size == 0) continue;
    save_num_updates(state.shared, trained, resting->second.num_updates);
    if (world_->rank() == 0) state.ranges.push_back({trained.name, 0, size, part_of(resting->second, 0, size)});
  }
}

void FlatStrategy::add_own_state(StrategyState& state) const {
  std::unordered_map<const c10::TensorImpl*, ElementRange> mine;  // of each parameter in a bucket
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const auto& bucket = flat_->buckets()[b];
    for (const auto& slot : bucket.slots) mine[slot.param.unsafeGetTensorImpl()] = {0, 0};
    for (const Piece& piece : pieces_in(bucket, written_range(b))) {
      mine[bucket.slots[piece.slot].param.unsafeGetTensorImpl()] = {piece.begin, piece.begin + piece.num_elements};
    }
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    const ParameterState whole = trained.optimizer->parameter_state(trained.group, trained.index);
    save_num_updates(state.shared, trained, whole.num_updates);
    const auto in_bucket = mine.find(trained.param.unsafeGetTensorImpl());
    const ElementRange resting{0, world_->rank() == 0 ? trained.param.numel() : 0};
    const ElementRange range = in_bucket == mine.end() ? resting : in_bucket->second;
    if (whole.num_updates == 0 || range.size() == 0) continue;
    state.ranges.push_back({trained.name, range.begin, range.end, part_of(whole, range.begin, range.size())});
  }
}

void FlatStrategy::load_state(const State& shared, const ReadRange& read) {
  const c10::NoGradGuard no_grad;
  load_optimizers(*module_, optimizers_, shared);
  num_steps_ = shared.get<int64_t>("num_steps");
  const State scale = shared.child("loss_scale");
  if (loss_scaling_ && !scale.empty()) {
    loss_scaling_->load_state(
        {.scale = scale.get<double>("scale"), .growth_tracker = scale.get<int64_t>("growth_tracker")});
  }
  bool pending = shared.get<bool>("pending");
  if (pending && !engine().delayed) {
    finish_saved_update(shared, read);
    pending = false;
  }
  shard_ ? load_shard_state(shared, read, pending) : load_own_state(shared, read);
  if (pending) schedule_->resume_late();
}

// The checkpoint is of a run with late updates, which this strategy has none of.
void FlatStrategy::finish_saved_update(const State& shared, const ReadRange& read) {
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    const ParameterState saved = read_whole(trained, shared, read);
    if (saved.num_updates == 0) continue;
    at::Tensor(trained.param).copy_(saved.tensors.contains("next") ? saved.tensor("next") : saved.tensor("master"));
  }
  flatten();  // copies of the parameters were made before
}

void FlatStrategy::load_shard_state(const State& shared, const ReadRange& read, bool pending) {
  std::unordered_set<const c10::TensorImpl*> in_buckets;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    std::vector<int64_t> num_updates;
    for (const auto& slot : flat_->buckets()[b].slots) {
      num_updates.push_back(saved_num_updates(shared, slot.name));
      in_buckets.insert(slot.param.unsafeGetTensorImpl());
    }
    shard_->load_ranges(b, num_updates, read, pending);
  }
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    if (in_buckets.contains(trained.param.unsafeGetTensorImpl())) continue;
    ParameterState& resting = resting_states_[trained.param.unsafeGetTensorImpl()];
    resting = read_whole(trained, shared, read);
    for (auto& [name, tensor] : resting.tensors) tensor = tensor.clone();
  }
}

void FlatStrategy::load_own_state(const State& shared, const ReadRange& read) {
  for (const Trained& trained : trained_params(*module_, optimizers_)) {
    trained.optimizer->load_parameter_state(trained.group, trained.index, read_whole(trained, shared, read));
  }
}

void FlatStrategy::teardown() noexcept {
  schedule_.reset();
  replicas_.reset();
  reducer_.reset();
  keeper_.reset();
  shard_.reset();
  flat_.reset();
  buffers_.clear();
  window_is_open_ = told_gathered_ = wants_norms_ = false;
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
