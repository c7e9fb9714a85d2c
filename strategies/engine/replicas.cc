#include "fulgur/strategies/engine/replicas.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <mutex>
#include <string>
#include <utility>

#include "fulgur/base/autocast.h"
#include "fulgur/base/error.h"
#include "fulgur/base/job_queue.h"
#include "fulgur/base/seed.h"
#include "fulgur/core/metric_log.h"
#include "fulgur/core/module.h"
#include "fulgur/optim/fused_update.h"

namespace fulgur {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Tied tensors appear as often as they are registered: a replica need not be tied to be right.
template <class Dict>
NamedTensors defined_ones(const Dict& tensors) {
  NamedTensors defined;
  for (const auto& item : tensors) {
    if (item.value().defined()) defined.emplace_back(item.key(), item.value());
  }
  return defined;
}

std::string describe(const NamedTensors& tensors, size_t i) {
  return i < tensors.size() ? c10::str("'", tensors[i].first, "' of shape ", tensors[i].second.sizes()) : "no more";
}

// Throws SetupError unless a replica has tensors of the same names and shapes, and owns them.
void check_replica(const Module& module, const NamedTensors& originals, const NamedTensors& copies) {
  for (size_t i = 0; i < std::max(originals.size(), copies.size()); ++i) {
    const std::string original = describe(originals, i), copy = describe(copies, i);
    if (original != copy) {
      throw SetupError(
          fmt::format("strategy 'dp' makes replicas of {} from the same arguments, but they have {} where "
                      "the module has {}; build all of it in the constructor, setup() or "
                      "configure_model()",
                      module.name(), copy, original));
    }
    if (originals[i].second.is_same(copies[i].second)) {
      throw SetupError(
          fmt::format("strategy 'dp' makes replicas of {} from the same arguments, so that they share {}, "
                      "which came as one; build layers in the constructor, and clone() tensors",
                      module.name(), original));
    }
  }
}

// Shares the memory of `original` if both are on one device, which is then the CPU.
void follow_parameter(const at::Tensor& copy, const at::Tensor& original) {
  if (copy.device() != original.device()) {
    copy.copy_(original, /*non_blocking=*/true);
  } else if (copy.const_data_ptr() != original.const_data_ptr()) {
    copy.set_data(original.detach());
  }
  if (copy.requires_grad() != original.requires_grad()) copy.set_requires_grad(original.requires_grad());
}

void add_gradient(const at::Tensor& param, const at::Tensor& grad) {
  at::Tensor& sum = param.mutable_grad();
  if (!sum.defined()) {
    sum = grad.to(param.device(), /*non_blocking=*/true);
    return;
  }
  sum = sum.to(optim::widened(sum.scalar_type()));
  sum.add_(grad.to(param.device(), /*non_blocking=*/true));
}

// GPUs that were seeded together would draw the same masks for different parts of a batch.
void seed_apart(const std::vector<c10::Device>& devices) {
  if (devices.front().is_cpu()) return;
  at::Context& context = at::globalContext();
  const uint64_t seed = context.defaultGenerator(devices.front()).current_seed();
  for (size_t i = 1; i < devices.size(); ++i) {
    at::Generator generator = context.defaultGenerator(devices[i]);
    const std::lock_guard lock(generator.mutex());
    if (generator.current_seed() == seed) generator.set_current_seed(seed + i);
  }
}

// After a parallel loop libgomp's threads spin for some milliseconds, on CPUs that the replicas need, unless it has
// more threads than there are CPUs. This gives it one more, which sleeps until the calling thread ends.
void keep_idle_threads_from_spinning() {
  at::set_num_threads(2);
  at::ones({1 << 17}).add_(1.0);  // enough elements for two threads
}

// Restores the module's link at the end of a scope in which the module logs elsewhere.
class ScopedRunAccess {
 public:
  explicit ScopedRunAccess(Module& module) : module_(module), link_(module.link()) {}
  ~ScopedRunAccess() { module_.attach(link_); }
  ScopedRunAccess(const ScopedRunAccess&) = delete;
  ScopedRunAccess& operator=(const ScopedRunAccess&) = delete;

 private:
  Module& module_;
  const RunAccess link_;
};

}  // namespace

struct Replicas::Replica {
  Replica(Module& its_module, c10::Device its_device)
      : module(its_module),
        device(its_device),
        params(defined_ones(module.named_parameters())),
        buffers(defined_ones(module.named_buffers())),
        submodules(module.modules()) {}

  Replica(std::shared_ptr<Module> made, c10::Device its_device, const Replica& original) : Replica(*made, its_device) {
    owned = std::move(made);
    check_replica(original.module, original.params, params);
    check_replica(original.module, original.buffers, buffers);
    TORCH_CHECK(submodules.size() == original.submodules.size(), "a replica of ", original.module.name(), " has ",
                submodules.size(), " submodules, the module has ", original.submodules.size());
    module.to(device);
    for (size_t i = 0; i < params.size(); ++i) take_over(params[i].second, original.params[i].second);
    for (size_t i = 0; i < buffers.size(); ++i) take_over(buffers[i].second, original.buffers[i].second);
  }

  // Takes over the dtype, too, which the precision may have changed.
  void take_over(const at::Tensor& copy, const at::Tensor& original) const {
    copy.set_data(original.detach().to(device, /*non_blocking=*/false, /*copy=*/true));
  }

  void follow(const Replica& original) const {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) follow_parameter(params[i].second, original.params[i].second);
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].second.copy_(original.buffers[i].second, /*non_blocking=*/true);
    }
    const auto same_mode = [](const auto& a, const auto& b) { return a->is_training() == b->is_training(); };
    if (std::ranges::equal(submodules, original.submodules, same_mode)) return;
    for (size_t i = 0; i < submodules.size(); ++i) submodules[i]->train(original.submodules[i]->is_training());
  }

  // Makes the replica log to a MetricLog of its own.
  void attach(const RunAccess& link, const Batch& part) {
    RunAccess own = link;
    if (link.metrics != nullptr) {
      log.begin_part(*link.metrics, part);
      own.metrics = &log;
    }
    if (!device.is_cpu()) own.device = device;
    own.sends_records = owned == nullptr;
    module.attach(own);
  }

  std::shared_ptr<Module> owned{};  // null for the first replica, which is the user's module
  Module& module;
  c10::Device device;
  NamedTensors params, buffers;
  std::vector<std::shared_ptr<torch::nn::Module>> submodules;  // parents first
  MetricLog log{};
  at::Tensor loss{};                // loss of the last step, with its graph
  std::vector<at::Tensor> spent{};  // gradients already added to another replica's; the next backward reuses the memory
  at::Tensor seed{};                // a leaf that stands for `loss` in the mean; its gradient is the weight of `loss`
  JobQueue worker{};
};

Replicas::Replicas(Module& module, const std::vector<c10::Device>& devices) : module_(module) {
  if (!module.automatic_optimization) {
    throw SetupError(
        fmt::format("{} optimises manually, which strategy 'dp' cannot share out: each replica would step "
                    "the same weights; leave automatic_optimization true, or use strategy 'ddp'",
                    module.name()));
  }
  seed_apart(devices);
  const ScopedRandomState random_state;
  replicas_.push_back(std::make_unique<Replica>(module, devices.front()));
  for (size_t i = 1; i < devices.size(); ++i) {
    const std::shared_ptr<Module> another = module.make_another();
    another->attach(module.link());
    another->setup(EntryPoint::fit);
    another->configure_model();
    replicas_.push_back(std::make_unique<Replica>(another, devices[i], *replicas_.front()));
  }
  prepare_threads();
}

Replicas::~Replicas() = default;

void Replicas::prepare_threads() {
  const int all = at::get_num_threads();
  const int share = std::max(1, all / static_cast<int>(replicas_.size()));
  on_each(replicas_.size(), [&](size_t i) {
    at::get_num_threads();  // the first call in a thread sets the number: later it would overwrite ours
    if (i == 0 && share == 1 && all > 1) keep_idle_threads_from_spinning();
    at::set_num_threads(share);
    at::autocast::increment_nesting();  // see on_each
  });
  at::set_num_threads(all);  // new threads would otherwise get the last number that any thread set
}

at::Tensor Replicas::training_step(const Batch& batch, int64_t batch_idx) {
  std::vector<Batch> parts = batch.split(static_cast<int64_t>(replicas_.size()));
  if (parts.empty()) parts.push_back(batch);  // a batch without samples
  on_each_gpu(parts.size(), [&](size_t i) {
    if (i > 0) replicas_[i]->follow(*replicas_.front());
    // The copy waits for what the first GPU has queued, which is not forward yet.
    parts[i] = parts[i].to(replicas_[i]->device, /*non_blocking=*/true);
  });
  run_steps(parts, batch_idx);
  if (MetricLog* metrics = module_.link().metrics) {
    std::vector<const MetricLog*> logs;
    for (size_t i = 0; i < parts.size(); ++i) logs.push_back(&replicas_[i]->log);
    metrics->add_parts(logs);
  }
  return mean_loss(parts);
}

void Replicas::run_steps(const std::vector<Batch>& parts, int64_t batch_idx) {
  for (const auto& replica : replicas_) replica->loss.reset();
  const ScopedRunAccess link_restored(module_);
  const RunAccess link = module_.link();
  for (size_t i = 0; i < parts.size(); ++i) replicas_[i]->attach(link, parts[i]);
  on_each(parts.size(), [&](size_t i) {
    Replica& replica = *replicas_[i];
    replica.loss = replica.module.training_step(parts[i], batch_idx);
  });
}

at::Tensor Replicas::mean_loss(const std::vector<Batch>& parts) {
  double num_samples = 0.0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (replicas_[i]->loss.defined()) num_samples += static_cast<double>(parts[i].batch_size());
  }
  at::Tensor mean;
  for (size_t i = 0; i < parts.size(); ++i) {
    Replica& replica = *replicas_[i];
    replica.seed.reset();
    if (!replica.loss.defined()) continue;
    if (replica.loss.numel() != 1) return replica.loss;  // not a scalar loss: the caller reports the error
    replica.seed = replica.loss.detach().requires_grad_(replica.loss.requires_grad());
    const double weight = num_samples > 0.0 ? static_cast<double>(parts[i].batch_size()) / num_samples : 1.0;
    const at::Tensor term = replica.seed.to(replicas_.front()->device).mul(weight);
    mean = mean.defined() ? mean.add(term) : term;
  }
  return mean;
}

void Replicas::backward() {
  const ScopedRandomState random_state;  // checkpoint() changes the random state, on every thread
  on_each(replicas_.size(), [&](size_t i) {
    Replica& replica = *replicas_[i];
    replica.spent.clear();
    const at::Tensor loss = std::exchange(replica.loss, {}), seed = std::exchange(replica.seed, {});
    if (seed.defined() && seed.grad().defined()) loss.backward(seed.grad());
  });
  sum_gradients();
}

// Sums as a tree, so that the order of additions is always the same and devices can work at once.
void Replicas::sum_gradients() {
  const c10::NoGradGuard no_grad;
  for (size_t stride = 1; stride < replicas_.size(); stride *= 2) {
    on_each_gpu(replicas_.size() - stride, [&](size_t into) {
      if (into % (2 * stride) != 0) return;
      Replica &sum = *replicas_[into], &term = *replicas_[into + stride];
      for (size_t i = 0; i < sum.params.size(); ++i) {
        const at::Tensor grad = std::exchange(term.params[i].second.mutable_grad(), {});
        if (!grad.defined()) continue;
        add_gradient(sum.params[i].second, grad);
        term.spent.push_back(grad);
      }
    });
  }
}

// For jobs that launch many copies between devices. On a CPU, which does the work itself, they run one after another
// on the calling thread, with its intra-op threads.
void Replicas::on_each_gpu(size_t count, const std::function<void(size_t)>& job) {
  if (!replicas_.front()->device.is_cpu()) return on_each(count, job);
  for (size_t i = 0; i < count; ++i) job(i);
}

// Runs job(i) on the threads of the first `count` replicas, in this thread's modes, and waits for all. Autocast keeps
// casts of weights for the whole process: they are dropped here, not at the end of a scope in one thread, when other
// threads may be about to use them again.
void Replicas::on_each(size_t count, const std::function<void(size_t)>& job) {
  const ScopedAutocast autocast(AutocastState::now(replicas_.front()->device.type()));
  const at::ThreadLocalState modes;
  std::vector<std::shared_future<void>> done;
  for (size_t i = 0; i < count; ++i) {
    done.push_back(replicas_[i]->worker.run([&, i] {
      const at::ThreadLocalStateGuard same_modes(modes);
      const c10::DeviceGuard device(replicas_[i]->device);
      job(i);
    }));
  }
  for (const auto& end : done) end.wait();
  for (const auto& end : done) end.get();
}

}  // namespace fulgur
