#include "fulgur/strategies/engine/separate_gradients.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/host_name.h"
#include "fulgur/core/gradient_clipping.h"
#include "fulgur/core/module.h"
#include "fulgur/distributed/rank_messages.h"
#include "fulgur/nn/sync_batch_norm.h"
#include "fulgur/optim/fused_update.h"
#include "fulgur/strategies/engine/saved_optimizers.h"

namespace fulgur {
namespace {

// The number of ranks on this host that may run on these cores, this one included: all of them, unless each rank is
// bound to its own cores. The ranks of a host need not be consecutive.
int64_t ranks_that_share(const std::vector<int>& cores, World& world) {
  if (world.world_size() == 1) return 1;
  const std::string own = fmt::format("{}: {}", host_name(), fmt::join(cores, " "));
  return std::ranges::count(all_gather_bytes(world.control(), own), own);
}

// The number of worker threads for the update; 0: the training thread updates.
int64_t num_update_threads(const GradientContext& context) {
  const EngineOptions& engine = context.engine;
  const bool on_host = engine.host_ratio > 0 || (engine.delayed && context.device().is_cpu());
  if (!on_host && engine.update_threads > 0) {
    throw UsageError(
        fmt::format("strategy '{}': update_threads = {} would have no effect, because nothing is updated on "
                    "the host; leave it out, or choose the base zero_offload",
                    context.strategy, engine.update_threads));
  }
  if (!on_host) return 0;
  if (engine.update_threads > 0) return engine.update_threads;
  const std::vector<int> cores = cores_of_process();
  return UpdateSchedule::default_workers(static_cast<int64_t>(cores.size()), ranks_that_share(cores, context.world()),
                                         /*on_gpu=*/!context.device().is_cpu());
}

// In a checkpoint's shared state: the parameters that the update in progress changes.
constexpr std::string_view kLate = "late_parameters";
std::string late_key(const std::string& parameter) { return fmt::format("{}/{}", kLate, parameter); }

ShardOptions shard_options(const GradientContext& context) {
  const EngineOptions& engine = context.engine;
  const ShardGrid& grid = context.groups.grid();
  return {.rank = grid.shard(),
          .world_size = grid.num_shards,
          .host_ratio = engine.host_ratio,
          .copies = engine.delayed,
          .num_workers = num_update_threads(context),
          .gradient_sums = engine.delayed ? 2 : 1,
          .accumulates = context.setup.accumulates && (context.alone() || engine.each_micro_batch),
          .ranks_on_host = context.setup.local_world_size};
}

}  // namespace

SeparateGradients::SeparateGradients(const GradientContext& context)
    : context_(context), shard_(context.parameters, context.optimizers, shard_options(context)) {
  const c10::Device device = context.device();
  if (context.engine.host_ratio > 0) {
    copy_worker_ = std::make_unique<StreamWorker>(device, StreamWorkerOptions{.one_thread = true});
  }
  Collective& data = context.groups.data();
  reducer_.emplace(context.parameters, data, context.world().control(),
                   ReduceOptions{.shard = context.engine.shard,
                                 .rank_order = context.setup.deterministic,
                                 .wire = context.alone() ? std::nullopt : context.engine.wire,
                                 .may_wait_for_memory = !nn::has_sync_batch_norm(context.module),
                                 .learns_order = context.setup.reduces_during_backward,
                                 .make_sums = [this](size_t bucket) { return shard_.make_sums(bucket); },
                                 .copy_worker = copy_worker_.get(),
                                 .host_threads = device.is_cpu() ? 0 : shard_.num_workers()});
  if (context.engine.delayed) say_what_is_late();
  const int64_t num_workers = shard_.num_workers();
  schedule_ = std::make_unique<UpdateSchedule>(
      context.parameters, context.optimizers, shard_, reducer_->sums(), data, device,
      UpdateWorkers{.count = num_workers, .number_of_first = context.world().rank() * num_workers});
  if (num_workers == 0) return;
  log_info("{}: {} thread{} a rank for the update", context.strategy, num_workers, num_workers == 1 ? "" : "s");
}

void SeparateGradients::say_what_is_late() const {
  const int64_t on_time = context_.engine.warmup_steps;
  const Optimizer& optimizer = context_.optimizers[0];
  std::string predicted = "and forward reads weights with a prediction of the update in progress";
  if (context_.engine.predict == optim::PredictBy::none) {
    predicted = "without a prediction";
  } else if (predict(/*optimizer=*/0) == optim::PredictBy::none) {
    predicted = fmt::format("without a prediction, because {} has no momentum", optimizer.name());
  }
  log_info("{}: updates are delayed by one step{}, {}", context_.strategy,
           on_time > 0 ? fmt::format(" after the first {} steps", on_time) : "", predicted);
}

void SeparateGradients::append() {
  shard_.append();
  reducer_->append();
  schedule_->remember_new_versions();
}

void SeparateGradients::open_window() {
  reducer_->sums().clear();
  is_shown_ = false;
}

ScopedGradientMemory SeparateGradients::begin_backward(bool is_last) {
  const bool reduces = context_.setup.reduces_during_backward && (is_last || reduces_each_micro_batch());
  if (reduces) reducer_->begin(/*takes_norms=*/is_last && wants_norms_);
  return reducer_->open_memory();
}

std::optional<AccumulationWindow> SeparateGradients::end_micro_batch(const AccumulationWindow& mine, bool is_last) {
  if (!is_last && !reduces_each_micro_batch()) return std::nullopt;
  return finish_window(*reducer_, mine);
}

at::Tensor SeparateGradients::norm(size_t /*optimizer*/) {
  wants_norms_ = true;
  const at::Tensor here = norm_here();
  if (context_.alone()) return here;
  World& world = context_.world();
  Collective& group = here.is_cpu() ? world.control() : world.data();
  if (!context_.engine.shard) {  // rank 0 decides, because the last bit depends on the number of threads
    const at::Tensor of_rank_0 = here.clone().reshape({1});
    group.broadcast(of_rank_0, /*root=*/0).wait();
    return of_rank_0.squeeze();
  }
  const at::Tensor squares = here.square().reshape({1});
  if (context_.groups.grid().group() > 0) squares.zero_();  // groups have the same gradients: the first one's count
  group.all_reduce(squares).wait();
  return squares.sqrt().squeeze();
}

// The norm over all sections, from the norm of each. Those that backward has left unmeasured are measured here, so that
// the first step of a run, which does not know yet that a norm is wanted, gives the bits of any other.
at::Tensor SeparateGradients::norm_here() const {
  const GradientSums& sums = reducer_->sums();
  std::vector<at::Tensor> norms, norms_on_host;
  for (size_t b = 0; b < context_.parameters.buckets().size(); ++b) {
    const bool is_measured = sums.norms(b).size() == sums.of(b).size();
    for (size_t s = 0; s < sums.of(b).size(); ++s) {
      const at::Tensor norm = is_measured ? sums.norms(b)[s] : joint_norm({sums.of(b)[s]});
      (norm.is_cpu() ? norms_on_host : norms).push_back(norm);
    }
  }
  if (!norms_on_host.empty()) {
    norms.push_back(at::linalg_vector_norm(at::stack(norms_on_host), 2).to(context_.device()));
  }
  if (norms.empty()) return joint_norm({}).to(context_.device());
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), 2);
}

// Gathers whole gradients on every rank.
void SeparateGradients::show(size_t /*optimizer*/) {
  if (is_shown_) return;
  const c10::NoGradGuard no_grad;
  GradientSums& sums = reducer_->sums();
  int64_t num_bytes = 0;
  for (size_t b = 0; b < context_.parameters.buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = context_.parameters.buckets()[b];
    if (std::ranges::all_of(sums.used(b), [](double used) { return used == 0; })) continue;
    sums.widen(b);
    const c10::ScalarType dtype = optim::widened(bucket.flat.scalar_type());
    const at::Tensor whole = at::zeros({bucket.flat.numel()}, bucket.flat.options().dtype(dtype));
    int64_t begin = shard_.range(b).begin;
    for (const at::Tensor& sum : sums.of(b)) {
      whole.narrow(0, begin, sum.numel()).copy_(sum);
      begin += sum.numel();
    }
    if (context_.engine.shard) context_.groups.data().all_gather(whole).wait();
    num_bytes += static_cast<int64_t>(whole.nbytes());
    for (size_t s = 0; s < bucket.slots.size(); ++s) {
      if (sums.used(b)[s] > 0) bucket.slots[s].param.mutable_grad() = view_in(whole, bucket.slots[s]);
    }
  }
  is_shown_ = true;
  warn_shown_(
      "a hook looks at the gradients before each step, so that every rank gathers all of them ({} bytes), which {} "
      "otherwise never holds",
      num_bytes, context_.strategy);
}

void SeparateGradients::take_back(size_t optimizer) {
  if (!std::exchange(is_shown_, false)) return;
  const c10::NoGradGuard no_grad;
  GradientSums& sums = reducer_->sums();
  for (size_t b = 0; b < context_.parameters.buckets().size(); ++b) {
    const FlatParameters::Bucket& bucket = context_.parameters.buckets()[b];
    const auto has_gradient = [](const auto& slot) { return slot.param.grad().defined(); };
    if (sums.of(b).empty() && std::ranges::any_of(bucket.slots, has_gradient)) sums.make_zero(b);
    if (sums.of(b).empty()) continue;
    for (size_t slot = 0; slot < bucket.slots.size(); ++slot) {
      sums.set_used(b, slot, bucket.slots[slot].param.grad().defined());
    }
    for (size_t s = 0; s < sums.of(b).size(); ++s) {
      for (const Piece& piece : pieces_in(bucket, shard_.sections(b)[s].range)) {
        const at::Tensor& param = bucket.slots[piece.slot].param;
        const at::Tensor sum = sums.of(b)[s].narrow(0, piece.offset, piece.num_elements);
        if (!param.grad().defined()) {
          sum.zero_();  // the hook has dropped it, and the norm is that of all sums
          continue;
        }
        const at::Tensor in_order = at::empty_like(param, param.grad().options()).copy_(param.grad());
        sum.copy_(in_order.as_strided({param.numel()}, {1}).narrow(0, piece.begin, piece.num_elements));
      }
    }
  }
  context_.optimizers[optimizer].zero_grad();
  sums.forget_norms();
}

void SeparateGradients::update(size_t optimizer, const GradientTransform& transform, const std::vector<double>& next_lr,
                               bool late) {
  const UpdateSchedule::LateOptions options{.predict = predict(optimizer), .next_lr = next_lr};
  schedule_->step(optimizer, transform, late ? &options : nullptr);
}

// Optimizers without momentum are not predicted: it would make training less stable. With SGD on a quadratic, a
// prediction by the last gradient lowers the largest stable learning rate from 1 / curvature to 0.618 / curvature.
optim::PredictBy SeparateGradients::predict(size_t optimizer) const {
  if (context_.engine.predict == optim::PredictBy::none) return optim::PredictBy::none;
  const auto& rules = static_cast<const optim::ElementWiseOptimizer&>(context_.optimizers[optimizer]);
  return rules.has_momentum() ? context_.engine.predict : optim::PredictBy::none;
}

// The range of a bucket's parameters that this rank updates.
at::Tensor SeparateGradients::range_of(size_t bucket) const {
  return shard_.range(bucket).of(context_.parameters.buckets()[bucket].flat);
}

void SeparateGradients::gather_parameters() {
  if (!each_has_a_part()) return;
  std::vector<Work> gathering;
  for (const auto& bucket : context_.parameters.buckets()) {
    gathering.push_back(context_.groups.data().all_gather(bucket.flat));
  }
  for (Work& work : gathering) work.wait();
}

void SeparateGradients::show_exact() {
  if (!is_late()) return;
  wait();
  const c10::NoGradGuard no_grad;
  for_forward_.resize(context_.parameters.buckets().size());
  for (size_t b = 0; b < for_forward_.size(); ++b) {
    if (!schedule_->updates(b)) continue;
    const bool on_host = shard_.sections(b).front().on_host;
    const at::Tensor range = range_of(b);
    for_forward_[b] = range.to(on_host ? c10::kCPU : range.device(), range.scalar_type(), /*non_blocking=*/false,
                               /*copy=*/true);
    shard_.show_exact(b);
  }
  gather_parameters();
}

void SeparateGradients::hide_exact() {
  if (for_forward_.empty()) return;
  const c10::NoGradGuard no_grad;
  for (size_t b = 0; b < for_forward_.size(); ++b) {
    if (for_forward_[b].defined()) range_of(b).copy_(for_forward_[b]);
  }
  for_forward_.clear();
  gather_parameters();
}

void SeparateGradients::parameters_were_written() {
  shard_.copy_parameters();
  schedule_->remember_versions();
}

std::vector<ExactValues> SeparateGradients::exact_values(size_t bucket, ElementRange within) const {
  return shard_.exact_values(bucket, within, schedule_->updates(bucket));
}

// With a delayed update in progress the optimizer state is the one after the update, and the module has the parameters
// after it. Ranges of the buckets that the update changes also have "forward", the parameters that the forward of the
// next step reads, and "predicted", those of the step after it. Only these buckets are late in the run that resumes:
// what others write to the rest before the next step is not lost.
void SeparateGradients::save(StrategyState& state) {
  TORCH_INTERNAL_ASSERT(!is_late() || !for_forward_.empty());
  const auto& buckets = context_.parameters.buckets();
  std::vector<int64_t> num_updates;  // by parameter, in the order of buckets
  for (size_t b = 0; b < buckets.size(); ++b) {
    OptimizerShard::LateTensors late;
    if (schedule_->updates(b)) {
      late = {{"forward", for_forward_[b]}, {"predicted", shard_.for_forward(b, schedule_->late_sums(b))}};
      if (predict(buckets[b].optimizer) == optim::PredictBy::none) late.pop_back();
      for (const auto& slot : buckets[b].slots) state.shared.set(late_key(slot.name), true);
    }
    auto ranges = shard_.state_ranges(b, context_.groups.grid().own_of(buckets[b].flat.numel()), late);
    std::ranges::move(ranges, std::back_inserter(state.ranges));
    std::ranges::copy(shard_.num_updates(b), std::back_inserter(num_updates));
  }
  const at::Tensor everywhere = at::tensor(num_updates, at::kLong);  // 0 on ranks without an element of a parameter
  if (!context_.alone()) context_.world().control().all_reduce(everywhere, ReduceOp::max).wait();
  std::unordered_map<const c10::TensorImpl*, int64_t> updates_of;
  const int64_t* next = everywhere.const_data_ptr<int64_t>();
  for (const auto& bucket : buckets) {
    for (const auto& slot : bucket.slots) updates_of[slot.param.unsafeGetTensorImpl()] = *next++;
  }
  for (const Trained& trained : trained_params(context_.module, context_.optimizers)) {
    const auto updates = updates_of.find(trained.param.unsafeGetTensorImpl());
    if (updates != updates_of.end()) save_num_updates(state.shared, trained, updates->second);
  }
}

void SeparateGradients::load(const State& shared, const ReadRange& read, bool late) {
  const c10::NoGradGuard no_grad;
  if (late) schedule_->resume_late(late_buckets(shared));
  for (size_t b = 0; b < context_.parameters.buckets().size(); ++b) {
    std::vector<int64_t> num_updates;
    for (const auto& slot : context_.parameters.buckets()[b].slots) {
      num_updates.push_back(saved_num_updates(shared, slot.name));
    }
    const bool is_late = schedule_->updates(b);
    OptimizerShard::LateTensors tensors;
    if (is_late) tensors = {{"forward", range_of(b).clone()}, {"predicted", range_of(b).clone()}};
    shard_.load_ranges(b, num_updates, read, tensors);
    if (!is_late) continue;
    range_of(b).copy_(tensors.front().second);
    shard_.set_for_forward(b, tensors.back().second, schedule_->late_sums(b));
  }
  if (late) gather_parameters();
}

// By bucket. A checkpoint of an earlier version of fulgur does not tell: then all are.
std::vector<bool> SeparateGradients::late_buckets(const State& shared) const {
  const bool tells = !shared.child(kLate).empty();
  std::vector<bool> late;
  for (const auto& bucket : context_.parameters.buckets()) {
    const auto is_late = [&](const auto& slot) { return shared.find<bool>(late_key(slot.name)) != nullptr; };
    late.push_back(!tells || std::ranges::any_of(bucket.slots, is_late));
  }
  return late;
}

}  // namespace fulgur
