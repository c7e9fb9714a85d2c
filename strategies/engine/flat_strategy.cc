#include "fulgur/strategies/engine/flat_strategy.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "fulgur/base/error.h"
#include "fulgur/base/first_error.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/names.h"
#include "fulgur/base/trace.h"
#include "fulgur/core/module.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/optim/gradient_divisor.h"
#include "fulgur/strategies/engine/gradients_at_parameters.h"
#include "fulgur/strategies/engine/rank_agreement.h"
#include "fulgur/strategies/engine/reduced_gradients.h"
#include "fulgur/strategies/engine/separate_gradients.h"

namespace fulgur {
namespace {

std::string name_of(const Module& module, const at::Tensor& param) {
  for (const auto& item : module.named_parameters()) {
    if (item.value().is_same(param)) return item.key();
  }
  return "";
}

constexpr size_t kSmallBatchBytes = 1 << 20;  // takes some 20 us to a GPU

bool is_large(const Batch& batch) {
  size_t num_bytes = 0;
  for (const auto& [name, tensor] : batch) {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_nested()) return false;
    num_bytes += tensor.nbytes();
  }
  return num_bytes >= kSmallBatchBytes;
}

std::vector<at::Tensor> tensors_of(const Batch& batch) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : batch) tensors.push_back(tensor);
  return tensors;
}

}  // namespace

void FlatStrategy::setup(Module& module, const StrategySetup& setup) {
  engine_ = engine_options();
  num_shards(engine_, setup.world.world_size(), setup.local_world_size);  // throws before the module is changed
  module_ = &module;
  setup_.emplace(setup);
  setup_->resumed = {};
  saved_generations_ = saved_generations(setup.resumed);
  converted_.emplace(module, setup.precision);
  current_device_.emplace(device());
  if (setup.cuda_graph) prepare_graphs();
  gpu_spans_.emplace(device());
  if (!device().is_cpu() && setup.only_copies_batches) batch_copies_.emplace(device());
  module.to(device());
  num_steps_ = 0;
  if (alone() && engine_.shard && !keeps_sums()) log_info("{} with one rank saves no memory", name());
  if (engine_.host_ratio > 0 && device().is_cpu()) {
    log_info("{} on a CPU saves no memory: parameters and state are in the same one", name());
  }
  for (const auto& [name, tensor] : named_state(module)) {
    if (tensor.defined()) known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
  if (alone()) return;
  make_equal(module, setup.world);
  attach_to_ranks();
}

// Checks that training_step can be recorded, and leaves the default stream.
void FlatStrategy::prepare_graphs() {
  if (setup_->devices.size() > 1) {
    throw UsageError(fmt::format(
        "cuda_graph records the step of one device, but strategy '{}' computes on {} in one process; use 'ddp'", name(),
        setup_->devices.size()));
  }
  if (setup_->precision.needs_loss_scale()) {
    throw UsageError(fmt::format(
        "cuda_graph computes gradients together with the loss, before the loss scale of precision '{}' could help; "
        "write precision = 'bf16-mixed'",
        setup_->precision.name()));
  }
  if (!module_->automatic_optimization) {
    throw SetupError(
        fmt::format("cuda_graph records forward and backward, but {} calls backward itself; leave "
                    "automatic_optimization true, or cuda_graph out",
                    module_->name()));
  }
  if (device().is_cpu()) return log_info("cuda_graph has no effect on a CPU");
  const c10::impl::VirtualGuardImpl gpu(device().type());
  gpu.synchronizeDevice(device().index());  // the module's tensors may still be written on the default stream
  stream_.emplace(gpu.getStreamFromGlobalPool(device()));
}

// Attaches layers that communicate with other ranks themselves, and collects the buffers that rank 0 broadcasts.
void FlatStrategy::attach_to_ranks() {
  if (nn::has_sync_batch_norm(*module_)) {  // on GPUs with a group of its own: backward reduces gradients meanwhile
    if (!device().is_cpu() && !statistics_) statistics_ = setup_->world.data().duplicate();
    nn::attach_sync_batch_norm(*module_, device().is_cpu() ? &setup_->world.control() : statistics_.get());
  }
  buffers_.clear();
  if (!engine_.broadcast_buffers) return;
  for (const at::Tensor& buffer : module_->buffers()) {
    if (buffer.defined()) buffers_.push_back(buffer);
  }
}

void FlatStrategy::setup_optimizers(Optimizers optimizers) {
  optimizers_ = std::move(optimizers);
  if (keeps_sums() && !module_->automatic_optimization) {
    throw SetupError(
        fmt::format("{} optimises manually, but strategy '{}' keeps the gradients of a step apart from the parameters; "
                    "use 'ddp', or leave automatic_optimization true",
                    module_->name(), name()));
  }
  check_can_average();
  const NamedTensors added = take_new_tensors();
  World& world = setup_->world;
  groups_.emplace(world, num_shards(engine_, world.world_size(), setup_->local_world_size), device(),
                  setup_->deterministic);
  if (groups_->grid().num_shards > 1 && groups_->grid().num_groups() > 1 && world.rank() == 0) {
    log_info("{}: shards among groups of {} ranks, of which there are {}", name(), groups_->grid().num_shards,
             groups_->grid().num_groups());
  }
  flat_.emplace(*module_, optimizers_, bucket_options(), std::exchange(saved_generations_, {}));
  agree_on_buckets(added);
  store_ = make_store();
  average_.emplace(*flat_, *store_, *groups_, engine_.host_ratio > 0 ? c10::Device(c10::kCPU) : device());
  warn_of_missing_masters();
  warn_of_unequal_threads();
  if (setup_->devices.size() > 1) replicas_.emplace(*module_, setup_->devices);
  if (stream_) graphed_step_.emplace(*module_, setup_->precision, device());
  if (!setup_->precision.needs_loss_scale()) return;
  for (const auto& optimizer : optimizers_) {
    if (!optimizer->needs_closure()) continue;
    throw UsageError(
        fmt::format("{} evaluates the loss several times in a step, which does not go with the loss scale "
                    "of precision '{}'; use 'bf16-mixed' or '32'",
                    optimizer->name(), setup_->precision.name()));
  }
  loss_scaling_.emplace(optimizers_.size());
}

// With shards, ranks gather updated parameters from each other's buckets.
BucketOptions FlatStrategy::bucket_options() {
  BucketOptions options = engine_.buckets_for(setup_->world.world_size(), device().type());
  if (engine_.shard && !alone()) {
    options.allocate = [&data = groups_->data()](int64_t num_elements, const at::TensorOptions& like) {
      return data.allocate(num_elements, like);
    };
  }
  return options;
}

bool FlatStrategy::keeps_sums() const { return engine_.keeps_sums(setup_->world.world_size()); }

std::unique_ptr<GradientStore> FlatStrategy::make_store() {
  const GradientContext context{.strategy = name(),
                                .module = *module_,
                                .optimizers = optimizers_,
                                .parameters = *flat_,
                                .engine = engine_,
                                .setup = *setup_,
                                .groups = *groups_};
  if (keeps_sums()) return std::make_unique<SeparateGradients>(context);
  if (alone()) return std::make_unique<GradientsAtParameters>(context);
  return std::make_unique<ReducedGradients>(context);
}

void FlatStrategy::check_can_average() const {
  if (!setup_->averages_weights) return;
  for (const auto& optimizer : optimizers_) {
    if (optimizer->is_element_wise()) continue;
    throw UsageError(fmt::format(
        "weights are averaged in the ranges that a rank updates, but {} needs whole tensors; use an optimizer that "
        "derives from optim::ElementWiseOptimizer, such as AdamW or SGD, or no WeightAveraging",
        optimizer->name()));
  }
}

void FlatStrategy::check_wire() const {
  if (!engine_.wire) return;
  for (const auto& bucket : flat_->buckets()) {
    if (bucket.flat.scalar_type() == at::kFloat) continue;
    throw UsageError(fmt::format(
        "strategy.wire = bf16 is for the gradients of fp32 parameters, but '{}' is {}, with precision '{}'; "
        "leave it at fp32, which sends gradients in the type of their parameters, or write precision = '32' "
        "or 'bf16-mixed'",
        bucket.slots.front().name, c10::toString(bucket.flat.scalar_type()), setup_->precision.name()));
  }
}

// Only a warning, because torch's own optimizers train 16-bit parameters in this way, too.
void FlatStrategy::warn_of_missing_masters() const {
  for (const auto& bucket : flat_->buckets()) {
    const Optimizer& optimizer = optimizers_[bucket.optimizer];
    if (!optim::is_16_bit(bucket.flat.scalar_type()) || optimizer.is_element_wise()) continue;
    return log_warning(
        "{} keeps no fp32 masters of 16-bit parameters, so that the part of an update that is smaller than half a unit "
        "in the last place of a weight is lost; use an element-wise optimizer such as AdamW or SGD, which keeps "
        "masters, or a precision with fp32 weights (bf16-mixed, 16-mixed, 32)",
        optimizer.name());
  }
}

// The norms of whole tensors that LAMB, LARS and LBFGS take on each rank are the same to the last bit only if as many
// threads add them up.
void FlatStrategy::warn_of_unequal_threads() const {
  const auto is_element_wise = [](const auto& optimizer) { return optimizer->is_element_wise(); };
  if (alone() || !device().is_cpu() || std::ranges::all_of(optimizers_, is_element_wise)) return;
  const auto numbers = all_gather_bytes(setup_->world.control(), std::to_string(at::get_num_threads()));
  const auto other =
      std::ranges::find_if(numbers, [&](const std::string& number) { return number != numbers.front(); });
  if (other == numbers.end() || setup_->world.rank() != 0) return;
  log_warning(
      "rank 0 computes with {} threads and rank {} with {}, so that the norms of gradients which an optimizer takes "
      "differ in their last bits, and in time the weights; give every rank as many, by OMP_NUM_THREADS",
      numbers.front(), other - numbers.begin(), *other);
}

// Checks that the ranks have the same parameters in buckets, and gives the tensors that were registered in the middle
// of the run the values of rank 0.
void FlatStrategy::agree_on_buckets(const NamedTensors& added) {
  check_wire();
  has_16_bit_params_ = std::ranges::any_of(flat_->buckets(), [](const FlatParameters::Bucket& bucket) {
    return optim::is_16_bit(bucket.flat.scalar_type());
  });
  if (alone()) return;
  check_same_buckets(*flat_, added, setup_->world.control());
  if (added.empty()) return;
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : added) tensors.push_back(tensor);
  broadcast_tensors(setup_->world.data(), tensors, /*root=*/0);
  attach_to_ranks();
}

// Puts parameters that are trained for the first time into buckets of their own. On every rank, while no gradients are
// being summed.
void FlatStrategy::take_newcomers() {
  if (flat_->contain_all_trainable(optimizers_)) return;
  store_->wait();  // an update in progress reads the buckets
  const NamedTensors added = take_new_tensors();
  flat_->append(*module_, optimizers_, bucket_options());
  agree_on_buckets(added);
  store_->append();
  average_->append();
}

// Returns the tensors that were registered after setup(), which converted and moved all others. Throws SetupError for
// a tensor of another dtype or on another device.
NamedTensors FlatStrategy::take_new_tensors() {
  NamedTensors added;
  for (const auto& [name, tensor] : named_state(*module_)) {
    if (!tensor.defined()) continue;
    if (!known_.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr()).second) continue;
    added.emplace_back(name, tensor);
    const c10::ScalarType dtype = tensor.is_floating_point()
                                      ? setup_->precision.true_dtype().value_or(tensor.scalar_type())
                                      : tensor.scalar_type();
    if (tensor.scalar_type() == dtype && tensor.device().type() == device().type()) continue;
    throw SetupError(c10::str("'", name, "' was registered after the strategy had set the module up, as ",
                              tensor.scalar_type(), " on ", tensor.device(), ", but the module is trained as ", dtype,
                              " on ", device(), "; make it of that dtype, on that device"));
  }
  return added;
}

// Gradients that are being summed already lack the parameter's.
void FlatStrategy::check_no_newcomers() const {
  TORCH_CHECK(flat_->contain_all_trainable(optimizers_),
              "a parameter was unfrozen or added in the middle of a step, whose gradients are being summed; do it in "
              "on_train_epoch_start, or in on_train_batch_start of a step's first batch (an Optimizer that "
              "on_before_optimizer_step was given lasts until the end of fit)");
}

// In manual optimisation: a gradient from before the parameter joined an optimizer was not summed over ranks.
void FlatStrategy::check_newcomers_have_no_gradients() const {
  if (alone()) return;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& param : optimizer->params()) {
      TORCH_CHECK(!param.grad().defined() || flat_->contains(param), "parameter '", name_of(*module_, param),
                  "' was added to an optimizer after it had got a gradient, which is of this rank alone; add it before "
                  "manual_backward(), or call zero_grad() then");
    }
  }
}

// Takes newcomers here, where every rank is at the same batch and no graph holds parameters, and those of
// training_step itself right after it.
at::Tensor FlatStrategy::training_step(const Batch& batch, int64_t batch_idx) {
  const bool starts_window = module_->automatic_optimization && !window_is_open_;
  if (starts_window) take_newcomers();
  const at::Tensor loss = forward(batch, batch_idx);
  if (starts_window && store_->collects_in_buckets()) take_newcomers();
  return loss;
}

at::Tensor FlatStrategy::forward(const Batch& batch, int64_t batch_idx) {
  const trace::Span span("forward");
  const ScopedGpuSpan on_gpu(*gpu_spans_, "forward");
  const ScopedPrecision scope(setup_->precision, device().type());
  if (graphed_step_) return graphed_step_->run(batch, batch_idx, /*keeps_gradients=*/window_is_open_);
  return replicas_ ? replicas_->training_step(batch, batch_idx) : module_->training_step(batch, batch_idx);
}

// Large batches are copied on a separate stream while the device is still computing the last step, but not by a user's
// hook: it may make tensors outside of the batch, whose memory would be reused too early if they came from another
// stream.
Batch FlatStrategy::to_device(const Batch& batch) {
  const Batch converted = setup_->precision.convert(batch);
  if (!batch_copies_ || !is_large(converted)) return module_->transfer_batch_to_device(converted, device());
  Batch there;
  batch_copies_->run([&] {
    there = module_->transfer_batch_to_device(converted, device());
    return tensors_of(there);
  });
  return there;
}

void FlatStrategy::zero_grad(size_t optimizer) {
  optimizers_[optimizer].zero_grad();
  if (loss_scaling_) loss_scaling_->zeroed(optimizer);
}

void FlatStrategy::backward(const at::Tensor& loss, bool is_last) {
  const trace::Span span("backward");
  const ScopedGpuSpan on_gpu(*gpu_spans_, "backward");
  const ScopedFullPrecision outside(setup_->precision, device().type());
  if (has_16_bit_params_) {  // gradients of further micro-batches are added in fp32; the first ones stay as they are
    for (const auto& optimizer : optimizers_) optim::widen_gradients(optimizer->params());
  }
  open_window();
  const ScopedGradientMemory memory = store_->begin_backward(is_last);
  module_->backward(loss_scaling_ ? loss_scaling_->scale(loss) : loss);
  if (replicas_) replicas_->backward();
}

// Begins an accumulation window. Sums left from the last window are dropped.
void FlatStrategy::open_window() {
  if (module_->automatic_optimization && !std::exchange(window_is_open_, true)) store_->open_window();
}

AccumulationWindow FlatStrategy::end_micro_batch(const AccumulationWindow& mine, bool is_last) {
  const trace::Span span("end of micro-batch");
  if (!store_->collects_in_buckets()) {
    if (is_last) window_is_open_ = false;
    return mine;
  }
  if (!window_is_open_) take_newcomers();  // a rank that skips the epoch comes without training_step()
  open_window();
  check_no_newcomers();
  if (mine.micro_batches == 0) {  // what is at the parameters belongs to the last step
    for (size_t i = 0; i < optimizers_.size(); ++i) zero_grad(i);
  }
  const std::optional<AccumulationWindow> all = store_->end_micro_batch(mine, is_last);
  if (!all) return mine;
  if (is_last || all->ends_epoch) {
    window_is_open_ = false;
    broadcast_buffers();
  }
  return *all;
}

void FlatStrategy::manual_backward(const at::Tensor& loss) {
  if (store_->collects_in_buckets()) {
    check_newcomers_have_no_gradients();
    take_newcomers();
  }
  scale_earlier_gradients();
  store_->add_mean([&] { backward(loss, /*is_last=*/true); });
  broadcast_buffers();
}

// Brings gradients that the next backward adds to to the present loss scale.
void FlatStrategy::scale_earlier_gradients() {
  for (size_t i = 0; loss_scaling_ && i < optimizers_.size(); ++i) {
    const double factor = loss_scaling_->factor_for_backward(i);
    if (factor == 1.0) continue;
    const std::vector<at::Tensor> params = optimizers_[i].params();
    optim::widen_gradients(params);
    scale_gradients(params, at::scalar_tensor(factor, at::kDouble));
  }
}

void FlatStrategy::broadcast_buffers() {
  if (!buffers_.empty()) broadcast_tensors(setup_->world.data(), buffers_, /*root=*/0);
}

StepReport FlatStrategy::optimizer_step(size_t index, const StepRequest& request) {
  const trace::Span span("optimizer step");
  const ScopedGpuSpan on_gpu(*gpu_spans_, "optimizer step");
  const ScopedFullPrecision outside(setup_->precision, device().type());
  window_is_open_ = false;
  const bool needs_closure = optimizers_[index].needs_closure();
  if (store_->collects_in_buckets() && module_->automatic_optimization && !needs_closure) {
    check_no_newcomers();
    store_->take_back(index);
  } else {
    if (!module_->automatic_optimization) check_newcomers_have_no_gradients();
    take_newcomers();
  }
  flat_->check_in_place();
  if (loss_scaling_) return scaled_step(index, request);
  StepReport report;
  if (needs_closure) {
    ++num_steps_;
    optimizers_[index].step(request.closure);
  } else {
    update(index, request, {}, report);
  }
  return report;
}

StepReport FlatStrategy::scaled_step(size_t index, const StepRequest& request) {
  at::Tensor norm;  // undefined if it was known already whether the gradients are finite
  const auto take_norm = [&] {
    norm = store_->norm(index);
    return norm.item<double>();
  };
  StepReport report{.skipped = loss_scaling_->is_non_finite(index, take_norm),
                    .loss_scale = loss_scaling_->loss_scale_of(index)};
  if (report.skipped) {
    drain();  // a delayed update belongs to the step before
  } else {
    update(index, request, {.unscale = loss_scaling_->factor(index), .norm = norm}, report);
  }
  loss_scaling_->stepped(index);
  return report;
}

void FlatStrategy::update(size_t index, const StepRequest& request, const ScaledGradients& gradients,
                          StepReport& report) {
  const GradientTransform transform = transform_for(index, request, gradients, report);
  report.skipped = request.accepts && !request.accepts(report.grad_norm);
  if (report.skipped) return drain();  // a delayed update belongs to the step before
  TORCH_CHECK(!evaluated_are_shown_,
              "the parameters are still those that validations take, because an exception has ended "
              "with_evaluated_weights() on one of several ranks; let it end the run");
  average_late_update();
  const bool is_warm = num_steps_++ >= engine_.warmup_steps;
  const bool late = engine_.delayed && is_warm;
  const auto next_lr = late && request.next_lr ? request.next_lr() : std::vector<double>{};
  store_->update(index, transform, next_lr, late);
}

void FlatStrategy::drain() {
  if (!store_) return;
  const bool was_shown = show_evaluated(false);  // what is shown gives way to what training reads
  average_late_update();
  store_->drain();
  if (was_shown) show_evaluated(true);
}

void FlatStrategy::average_weights(double share) {
  TORCH_CHECK(average_ && setup_->averages_weights, name(), ": weights are averaged in fit, if setup was told so");
  average_late_update();  // An earlier call may still wait for its update.
  if (store_->is_late()) {
    share_of_late_ = share;
  } else {
    average_->add(share);
  }
}

void FlatStrategy::average_late_update() {
  if (!share_of_late_) return;
  store_->wait();
  average_->add(*std::exchange(share_of_late_, std::nullopt));
}

bool FlatStrategy::show_evaluated(bool shown) {
  if (!store_ || evaluated_are_shown_ == shown) return shown;
  if (shown) {
    average_late_update();
    store_->show_exact();
    average_->show();
  } else {
    average_->hide();
    store_->hide_exact();
  }
  evaluated_are_shown_ = shown;
  return !shown;
}

// One factor for the mean over micro-batches, the loss scale and the clipping of the norm, computed in fp64 where the
// gradients are, so that nothing waits for the device. Reports the norm if it is of use.
GradientTransform FlatStrategy::transform_for(size_t index, const StepRequest& request,
                                              const ScaledGradients& gradients, StepReport& report) {
  GradientTransform transform;
  const double mean = gradients.unscale / static_cast<double>(request.micro_batches);
  const auto norm = [&] { return gradients.norm.defined() ? gradients.norm : store_->norm(index); };
  const GradientClipping& clipping = request.clipping;
  const bool clips_norm = clipping.active() && clipping.algorithm == ClipAlgorithm::norm;
  if (clips_norm) {
    ClippedNorm clipped = clip_norm(norm(), mean, clipping.value);
    report.grad_norm = std::move(clipped.norm);
    transform.factor = std::move(clipped.factor);
  } else {
    if (request.wants_norm) report.grad_norm = norm().mul(mean);
    if (mean != 1.0) transform.factor = at::scalar_tensor(mean, at::device(device()).dtype(at::kDouble));
  }
  if (clipping.active() && clipping.algorithm == ClipAlgorithm::value) transform.clip_value = clipping.value;
  return transform;
}

void FlatStrategy::materialize_gradients(size_t index, int64_t micro_batches) {
  double factor = 1.0 / static_cast<double>(micro_batches);
  if (loss_scaling_) {
    // before a hook changes the gradients
    loss_scaling_->is_non_finite(index, [&] { return store_->norm(index).item<double>(); });
    factor *= loss_scaling_->factor(index);
    loss_scaling_->unscaled(index);
  }
  store_->show(index);
  if (factor != 1.0) scale_gradients(optimizers_[index].params(), at::scalar_tensor(factor, at::kDouble));
}

void FlatStrategy::teardown() noexcept {
  complete_after_error();
  share_of_late_.reset();
  evaluated_are_shown_ = false;
  average_.reset();
  store_.reset();
  groups_.reset();
  replicas_.reset();
  graphed_step_.reset();
  batch_copies_.reset();
  gpu_spans_.reset();
  buffers_.clear();
  known_.clear();
  window_is_open_ = false;
  optimizers_ = {};
  loss_scaling_.reset();
  Module* module = std::exchange(module_, nullptr);
  if (module != nullptr) bring_back(*module);
  flat_.reset();
  setup_.reset();
}

// After an exception a delayed update may be in progress. It is completed if that takes no other rank.
void FlatStrategy::complete_after_error() noexcept {
  if (!store_ || !store_->is_late() || evaluated_are_shown_) return;
  if (engine_.shard && !alone()) {
    if (setup_->world.rank() > 0) return;
    return log_warning(
        "{}: the run failed during a delayed update that is sharded over the ranks and can no longer be completed; the "
        "module has the weights that the next forward would have read, which lack that update: load a checkpoint "
        "before you use them",
        name());
  }
  FirstError error;
  error.run([&] { store_->drain(); });
  error.warn(name() + ": the last update could not be completed");
}

void FlatStrategy::bring_back(Module& module) noexcept {
  nn::attach_sync_batch_norm(module, nullptr);
  leave_statistics();
  FirstError error;
  error.run([&] {
    if (device().is_cpu()) return;
    module.zero_grad();  // Module::to does not move gradients
    module.to(c10::kCPU);
  });
  error.run([&] { flat_.reset(); });  // after module.to(): else parameters are copied out of buckets on the device
  error.run([&] {
    if (converted_) converted_->give_back();
  });
  error.run([&] {
    stream_.reset();
    current_device_.reset();
  });
  error.warn("the module could not be brought back to the CPU");
}

// The group of SyncBatchNorm on GPUs is closed after every rank's device has completed its work in the group: an
// aborted kernel leaves garbage in the last update, and other ranks may still read this device's memory.
void FlatStrategy::leave_statistics() noexcept {
  if (statistics_ == nullptr) return;
  try {
    setup_->world.control().barrier();  // throws if a rank has failed: the device might then wait forever
    c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(device().index());
    setup_->world.control().barrier();
  } catch (const std::exception& error) {
    statistics_->abort(error.what());
  }
  statistics_.reset();
}

}  // namespace fulgur
