#include "fulgur/strategies/engine/flat_strategy.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/base/trace.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/c10d_collective.h"
#include "fulgur/distributed/exchange.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/gradient_divisor.h"
#include "fulgur/strategies/engine/rank_agreement.h"

namespace fulgur {
namespace {

std::shared_ptr<Collective> sub_group_of_all(Collective& group) {
  std::vector<int64_t> ranks(static_cast<size_t>(group.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.sub_group(ranks);
}

std::string name_of(const Module& module, const at::Tensor& param) {
  for (const auto& item : module.named_parameters()) {
    if (item.value().is_same(param)) return item.key();
  }
  return "";
}

}  // namespace

void FlatStrategy::setup(Module& module, const StrategySetup& setup) {
  engine_ = engine_options();
  module_ = &module;
  world_ = &setup.world;
  deterministic_ = setup.deterministic;
  local_world_size_ = setup.local_world_size;
  sends_ahead_ = setup.sends_ahead;
  accumulates_ = setup.accumulates;
  precision_ = setup.precision;
  converted_.emplace(module, precision_);
  devices_ = setup.devices;
  device_ = devices_.front();
  current_device_.emplace(device_);
  module.to(device_);
  num_steps_ = 0;
  if (alone() && engine_.shard && !wants_sums()) log_info("{} with one rank saves no memory", name());
  if (engine_.host_ratio > 0 && device_.is_cpu()) {
    log_info("{} on a CPU saves no memory: parameters and state are in the same one", name());
  }
  for (const auto& [name, tensor] : named_state(module)) {
    if (tensor.defined()) known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
  if (alone()) return;
  make_equal(module, *world_);
  attach_to_ranks();
}

// Attaches layers that communicate with other ranks themselves, and collects the buffers that rank 0 broadcasts.
void FlatStrategy::attach_to_ranks() {
  if (nn::has_sync_batch_norm(*module_)) {  // on GPUs with a group of its own: backward reduces gradients meanwhile
    if (!device_.is_cpu() && !statistics_) statistics_ = sub_group_of_all(world_->data());
    nn::attach_sync_batch_norm(*module_, device_.is_cpu() ? &world_->control() : statistics_.get());
  }
  buffers_.clear();
  if (!engine_.broadcast_buffers) return;
  for (const at::Tensor& buffer : module_->buffers()) {
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
  num_update_threads_ = wanted_update_threads();
  flatten();
  if (num_update_threads_ > 0) {
    log_info("{}: {} thread{} a rank for the update", name(), num_update_threads_, num_update_threads_ == 1 ? "" : "s");
  }
  warn_of_missing_masters();
  warn_of_unequal_threads();
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

// Only a warning, because torch's own optimizers train 16-bit parameters in this way, too.
void FlatStrategy::warn_of_missing_masters() const {
  for (const auto& bucket : flat_->buckets()) {
    const Optimizer& optimizer = optimizers_[bucket.optimizer];
    if (!optim::is_16_bit(bucket.flat.scalar_type()) || optimizer.element_wise()) continue;
    return log_warning(
        "{} keeps no fp32 masters of 16-bit parameters, as AdamW, Adam, SGD, Adagrad, RMSprop and Lion do: of an "
        "update what is smaller than half a unit of a weight is lost; use one of those, or a precision with fp32 "
        "weights (bf16-mixed, 16-mixed, 32)",
        optimizer.name());
  }
}

// The norms of whole tensors that LAMB, LARS and LBFGS take on each rank are the same to the last bit only if as many
// threads add them up.
void FlatStrategy::warn_of_unequal_threads() const {
  const auto is_element_wise = [](const auto& optimizer) { return optimizer->element_wise(); };
  if (alone() || !device_.is_cpu() || std::ranges::all_of(optimizers_, is_element_wise)) return;
  const auto numbers = all_gather_bytes(world_->control(), std::to_string(at::get_num_threads()));
  const auto other =
      std::ranges::find_if(numbers, [&](const std::string& number) { return number != numbers.front(); });
  if (other == numbers.end() || world_->rank() != 0) return;
  log_warning(
      "rank 0 computes with {} threads and rank {} with {}, so that the norms of gradients which an optimizer takes "
      "differ in their last bits, and in time the weights; give every rank as many, by OMP_NUM_THREADS",
      numbers.front(), other - numbers.begin(), *other);
}

// Whether sums of gradients are kept apart from the parameters, in the ranges that this rank updates.
bool FlatStrategy::wants_sums() const {
  return (engine_.shard && !alone()) || engine_.host_ratio > 0 || engine_.delayed;
}

void FlatStrategy::flatten() {
  schedule_.reset();
  reducer_.reset();
  keeper_.reset();
  shard_.reset();
  flat_.reset();
  const NamedTensors added = take_new_tensors();
  flat_.emplace(*module_, optimizers_, engine_.buckets_for(world_->world_size()));
  members_.clear();
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& param : optimizer->params()) members_.insert(param.unsafeGetTensorImpl());
  }
  has_16_bit_params_ = std::ranges::any_of(flat_->buckets(), [](const FlatParameters::Bucket& bucket) {
    return optim::is_16_bit(bucket.flat.scalar_type());
  });
  if (!alone()) {
    check_same_buckets(*flat_, added, world_->control());
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : added) tensors.push_back(tensor);
    if (!added.empty()) broadcast_tensors(world_->data(), tensors, /*root=*/0);
    if (!added.empty()) attach_to_ranks();
  }
  ReduceOptions reduce{.shard = engine_.shard,
                       .rank_order = deterministic_,
                       .waits_for_memory = !nn::has_sync_batch_norm(*module_),
                       .learns_order = sends_ahead_ && module_->automatic_optimization};
  if (wants_sums()) {
    shard_.emplace(*flat_, optimizers_,
                   ShardOptions{.rank = engine_.shard ? world_->rank() : 0,
                                .world_size = engine_.shard ? world_->world_size() : 1,
                                .host_ratio = engine_.host_ratio,
                                .copies = engine_.delayed,
                                .num_workers = num_update_threads_,
                                .gradient_sums = engine_.delayed ? 2 : 1,
                                .accumulates = accumulates_ && (alone() || engine_.each_micro_batch),
                                .ranks_on_host = local_world_size_});
    if (engine_.host_ratio > 0) keeper_ = std::make_unique<SideWorker>(device_, SideWorkerOptions{.one_thread = true});
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
}

// Returns the tensors that were registered after setup(), which converted and moved all others. Throws SetupError for
// a tensor of another dtype or on another device.
NamedTensors FlatStrategy::take_new_tensors() {
  NamedTensors added;
  for (const auto& [name, tensor] : named_state(*module_)) {
    if (!tensor.defined()) continue;
    if (!known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr()).second) continue;
    added.emplace_back(name, tensor);
    const c10::ScalarType dtype =
        tensor.is_floating_point() ? precision_.true_dtype().value_or(tensor.scalar_type()) : tensor.scalar_type();
    if (tensor.scalar_type() == dtype && tensor.device().type() == device_.type()) continue;
    throw SetupError(c10::str("'", name, "' was registered after the strategy had set the module up, as ",
                              tensor.scalar_type(), " on ", tensor.device(), ", but the module is trained as ", dtype,
                              " on ", device_, "; make it of that dtype, on that device"));
  }
  return added;
}

// The number of worker threads for the update; 0: the training thread updates.
int64_t FlatStrategy::wanted_update_threads() const {
  if (engine_.host_ratio == 0 && !(engine_.delayed && device_.is_cpu())) return 0;
  if (engine_.update_threads > 0) return engine_.update_threads;
  const std::vector<int> cores = cores_of_process();
  return UpdateSchedule::default_workers(static_cast<int64_t>(cores.size()), ranks_that_share(cores),
                                         /*on_gpu=*/!device_.is_cpu());
}

// The number of ranks on this host that may run on these cores, this one included: all of them, unless each rank is
// bound to its own cores. The ranks of a host need not be consecutive.
int64_t FlatStrategy::ranks_that_share(const std::vector<int>& cores) const {
  if (alone()) return 1;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string own = fmt::format("{}: {}", host.data(), fmt::join(cores, " "));
  return std::ranges::count(all_gather_bytes(world_->control(), own), own);
}

// Recreates the buckets if a parameter was frozen or unfrozen, or a group was added.
void FlatStrategy::rebuild_if_changed() {
  if (flat_->are_those_of(optimizers_)) return;
  TORCH_CHECK(!schedule_ || !schedule_->is_late(),
              "a parameter was frozen, unfrozen or added while a step with a late update was running; do it in "
              "on_train_epoch_start or on_train_batch_start");
  if (keeps_sums()) {
    auto states = shard_->gather_all(engine_.shard ? world_->data() : alone_);
    resting_states_.merge(states);
  }
  flatten();
  if (!keeps_sums()) return;
  shard_->set_all(resting_states_);
  for (const auto& bucket : flat_->buckets()) {
    for (const auto& slot : bucket.slots) resting_states_.erase(slot.param.unsafeGetTensorImpl());
  }
}

void FlatStrategy::drain_and_rebuild_if_changed() {
  if (flat_->are_those_of(optimizers_)) return;
  drain();
  rebuild_if_changed();
}

void FlatStrategy::check_unchanged() const {
  TORCH_CHECK(flat_->are_those_of(optimizers_),
              "a parameter was frozen, unfrozen or added in the middle of a step, whose gradients are being summed; do "
              "it in on_train_epoch_start, or in on_train_batch_start of a step's first batch (an Optimizer that "
              "on_before_optimizer_step was given lasts until the end of fit)");
}

// In manual optimisation: a gradient from before the parameter joined an optimizer was not summed over ranks.
void FlatStrategy::check_newcomers() const {
  if (alone()) return;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& param : optimizer->params()) {
      TORCH_CHECK(!param.grad().defined() || members_.contains(param.unsafeGetTensorImpl()), "parameter '",
                  name_of(*module_, param),
                  "' was added to an optimizer after it had got a gradient, which is of this rank alone; add it before "
                  "manual_backward(), or call zero_grad() then");
    }
  }
}

// Looks for changed parameters here, where every rank is at the same batch and no graph holds parameters. Changes
// that training_step itself makes are detected right after it.
at::Tensor FlatStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  const bool starts_window = module_->automatic_optimization && !window_is_open_;
  if (starts_window) drain_and_rebuild_if_changed();
  const at::Tensor loss = forward(batch, batch_idx);
  if (starts_window && reducer_) rebuild_if_changed();
  return loss;
}

at::Tensor FlatStrategy::forward(const Batch& batch, int64_t batch_idx) {
  const trace::Span span("forward");
  const PrecisionScope scope(precision_, device_.type());
  return replicas_ ? replicas_->training_step(batch, batch_idx) : module_->training_step(batch, batch_idx);
}

Batch FlatStrategy::to_device(const Batch& batch) {
  return module_->transfer_batch_to_device(precision_.convert(batch), device_);
}

void FlatStrategy::zero_grad(size_t optimizer) {
  if (module_->automatic_optimization && !window_is_open_) rebuild_if_changed();
  optimizers_[optimizer].zero_grad();
  if (loss_scaling_) loss_scaling_->zeroed(optimizer);
}

void FlatStrategy::backward(const at::Tensor& loss, bool is_last) {
  const trace::Span span("backward");
  const OutsidePrecisionScope outside(precision_, device_.type());
  if (has_16_bit_params_) {  // gradients of further micro-batches are added in fp32; the first ones stay as they are
    for (const auto& optimizer : optimizers_) optim::widen_gradients(optimizer->params());
  }
  open_window();
  if (reducer_ && sends_ahead_ && (is_last || reduces_each_micro_batch())) {
    reducer_->begin(/*measures=*/is_last && wants_norms_);
    norms_are_known_ = true;
  }
  module_->backward(loss_scaling_ ? loss_scaling_->scale(loss) : loss);
  if (replicas_) replicas_->backward();
}

// Begins an accumulation window. Sums left from the last window are dropped.
void FlatStrategy::open_window() {
  if (!module_->automatic_optimization || std::exchange(window_is_open_, true) || !keeps_sums()) return;
  reducer_->clear();
  are_gathered_.assign(optimizers_.size(), false);
}

Window FlatStrategy::end_micro_batch(const Window& mine, bool is_last) {
  const trace::Span span("end of micro-batch");
  if (!reducer_) {
    if (is_last) window_is_open_ = false;
    return mine;
  }
  if (!window_is_open_) drain_and_rebuild_if_changed();  // a rank that skips the epoch comes without training_step()
  open_window();
  check_unchanged();
  if (!is_last && !reduces_each_micro_batch()) return mine;
  if (mine.micro_batches == 0) {  // drop the gradients of the previous step
    for (const auto& optimizer : optimizers_) optimizer->zero_grad();
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
  check_newcomers();
  rebuild_if_changed();
  std::vector<std::pair<at::Tensor, at::Tensor>> earlier;  // copies: gradients of the last backward lie in the buckets
  std::vector<at::Tensor> params;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& param : optimizer->params()) {
      params.push_back(param);
      const at::Tensor grad = std::exchange(param.mutable_grad(), {});
      if (grad.defined())
        earlier.emplace_back(param, grad.to(optim::widened(grad.scalar_type()), false, /*copy=*/true));
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
  window_is_open_ = false;
  const bool needs_closure = optimizers_[index].needs_closure();
  if (reducer_ && module_->automatic_optimization && !needs_closure) {
    check_unchanged();
    if (keeps_sums() && are_gathered_[index]) take_gathered_gradients(index);
  } else {
    if (!module_->automatic_optimization) check_newcomers();
    rebuild_if_changed();
  }
  flat_->check_in_place();
  if (loss_scaling_) return scaled_step(index, request);
  if (needs_closure) {
    ++num_steps_;
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
    drain();  // a delayed update belongs to the step before
  } else {
    update(index, transform_for(index, request, loss_scaling_->factor(index)));
  }
  loss_scaling_->stepped(index);
  return report;
}

void FlatStrategy::update(size_t index, const GradientTransform& transform) {
  const bool is_warm = num_steps_++ >= engine_.warmup_steps;
  if (!schedule_) return optimizers_[index].step(transform);
  schedule_->step(index, transform, /*late=*/engine_.delayed && is_warm);
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
    const at::Tensor norm = alone() ? norm_here(index) : norm_of_all_ranks(norm_here(index));
    transform.factor = clip_coefficient(norm.mul(mean), clipping.value).mul(mean);
  } else if (mean != 1.0) {
    transform.factor = at::scalar_tensor(mean, at::device(device_).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

// If every rank has all gradients, the norm of rank 0 counts: with another number of threads the last bit could
// differ, and then the parameters would differ between ranks.
at::Tensor FlatStrategy::norm_of_all_ranks(const at::Tensor& norm) const {
  Collective& group = norm.is_cpu() ? world_->control() : world_->data();
  if (engine_.shard) {
    const at::Tensor squares = norm.square().reshape({1});
    group.all_reduce(squares).wait();
    return squares.sqrt().squeeze();
  }
  const at::Tensor of_rank_0 = norm.clone().reshape({1});
  group.broadcast(of_rank_0, /*root=*/0).wait();
  return of_rank_0.squeeze();
}

// The norm over the sections on the host and on the device.
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
  std::vector<at::Tensor> norms, norms_on_host;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    if (flat_->buckets()[b].optimizer != index) continue;
    if (reducer_->norms(b).size() != reducer_->sums(b).size()) return std::nullopt;
    for (const at::Tensor& norm : reducer_->norms(b)) (norm.is_cpu() ? norms_on_host : norms).push_back(norm);
  }
  if (!norms_on_host.empty()) norms.push_back(at::linalg_vector_norm(at::stack(norms_on_host), 2).to(device_));
  if (norms.empty()) return std::nullopt;
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), 2);
}

// The summed gradients of an optimizer on this rank: all of them, or the rank's ranges.
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
  if (!engine_.shard || alone()) return here;  // every rank has the same gradients
  GroupRanks ranks(world_->control());
  return any_rank(ranks, here);
}

void FlatStrategy::materialize_gradients(size_t index, int64_t micro_batches) {
  double factor = 1.0 / static_cast<double>(micro_batches);
  if (loss_scaling_) {
    loss_scaling_->is_non_finite(index, [&] { return any_non_finite(index); });  // before a hook changes gradients
    factor *= loss_scaling_->factor(index);
    loss_scaling_->unscaled(index);
  }
  keeps_sums() ? gather_gradients(index) : optim::widen_gradients(optimizers_[index].params());
  if (factor != 1.0) scale_gradients(optimizers_[index].params(), at::scalar_tensor(factor, at::kDouble));
}

// Gathers whole gradients on every rank, for a hook that reads them.
void FlatStrategy::gather_gradients(size_t index) {
  const c10::NoGradGuard no_grad;
  int64_t num_bytes = 0;
  for (size_t b = 0; b < flat_->buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = flat_->buckets()[b];
    if (bucket.optimizer != index || std::ranges::all_of(reducer_->used(b), [](double used) { return used == 0; })) {
      continue;
    }
    reducer_->widen_sums(b);
    const std::vector<at::Tensor>& sums = reducer_->sums(b);
    const c10::ScalarType dtype = optim::widened(bucket.flat.scalar_type());
    const at::Tensor whole = at::zeros({bucket.flat.numel()}, bucket.flat.options().dtype(dtype));
    int64_t begin = shard_->range(b).begin;
    for (const at::Tensor& sum : sums) {
      whole.narrow(0, begin, sum.numel()).copy_(sum);
      begin += sum.numel();
    }
    if (engine_.shard) world_->data().all_gather(whole).wait();
    num_bytes += static_cast<int64_t>(whole.nbytes());
    for (size_t s = 0; s < bucket.slots.size(); ++s) {
      const auto& slot = bucket.slots[s];
      if (reducer_->used(b)[s] == 0) continue;
      slot.param.mutable_grad() = whole.as_strided(slot.param.sizes(), slot.param.strides(), slot.begin);
    }
  }
  are_gathered_[index] = true;
  warn_gathered_(
      "a hook looks at the gradients before each step, so that every rank gathers all of them ({} bytes), which {} "
      "otherwise never holds",
      num_bytes, name());
}

// Copies the gathered gradients, which a hook may have changed, back into the sums.
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

void FlatStrategy::teardown() noexcept {
  schedule_.reset();
  replicas_.reset();
  reducer_.reset();
  keeper_.reset();
  shard_.reset();
  buffers_.clear();
  members_.clear();
  known_.clear();
  resting_states_.clear();
  window_is_open_ = wants_norms_ = false;
  warn_gathered_ = {};
  optimizers_ = {};
  loss_scaling_.reset();
  Module* module = std::exchange(module_, nullptr);
  if (module != nullptr) bring_back(*module);
  flat_.reset();
}

void FlatStrategy::bring_back(Module& module) noexcept {
  nn::attach_sync_batch_norm(module, nullptr);
  leave_statistics();
  try {
    if (!device_.is_cpu()) {
      module.zero_grad();  // Module::to does not move gradients
      module.to(c10::kCPU);
    }
    flat_.reset();  // after module.to(): earlier, parameters would be copied out of buckets on the device
    if (converted_) converted_->give_back();
    current_device_.reset();
  } catch (const std::exception& error) {
    log_warning("the module could not be brought back to the CPU: {}", error.what());
  }
}

// The group of SyncBatchNorm on GPUs is closed after every rank's device has completed its work in the group: an
// aborted kernel leaves garbage in the last update, and other ranks may still read this device's memory.
void FlatStrategy::leave_statistics() noexcept {
  if (statistics_ == nullptr) return;
  try {
    world_->control().barrier();  // throws if a rank has failed: the device might then wait forever
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    world_->control().barrier();
  } catch (const std::exception& error) {
    if (auto* group = dynamic_cast<C10dCollective*>(statistics_.get())) group->abort(error.what());
  }
  statistics_.reset();
}

}  // namespace fulgur
