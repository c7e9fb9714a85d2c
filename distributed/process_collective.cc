#include "fulgur/distributed/process_collective.h"

#include <ATen/ops/zeros.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <utility>
#include <vector>

#include "fulgur/base/error.h"
#include "fulgur/base/job_queue.h"
#include "fulgur/base/logging.h"
#include "fulgur/base/trace.h"
#include "fulgur/distributed/c10d_op.h"
#include "fulgur/distributed/detached_call.h"
#include "fulgur/distributed/host_transport.h"

namespace fulgur {
namespace {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

// Identifies one call of a group in errors.
struct Call {
  const char* name;
  int64_t number;
};

// How often a rank that connects asks whether the run has failed.
constexpr std::chrono::milliseconds kBetweenLooks{20};

// bool as bytes of 0 and 1, whose sum is taken as their maximum: no backend adds bools.
at::Tensor as_numbers(const at::Tensor& flat) { return flat.scalar_type() == at::kBool ? flat.view(at::kByte) : flat; }
ReduceOp number_op(const at::Tensor& flat, ReduceOp op) {
  return flat.scalar_type() == at::kBool && op == ReduceOp::sum ? ReduceOp::max : op;
}

// One view per rank.
std::vector<at::Tensor> parts_of(const at::Tensor& flat, int64_t world_size) {
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < world_size; ++rank)
    parts.push_back(rank_range(flat.numel(), rank, world_size).of(flat));
  return parts;
}

std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string whole = c10_error ? c10_error->what_without_backtrace() : error.what();
  return whole.substr(0, whole.find('\n'));
}

}  // namespace

class ProcessCollective::Impl {
 public:
  // `whole_aborts` is requested to stop when the group of which this one is a part is aborted.
  Impl(GroupConfig group, std::shared_ptr<Heartbeat> heartbeat, std::vector<ConnectTransport> transports,
       const std::stop_token& whole_aborts)
      : group_(std::move(group)),
        heartbeat_(std::move(heartbeat)),
        transports_(std::move(transports)),
        progress_(heartbeat_->progress(group_.name)) {
    progress_.name = GroupProgress::kConnecting;
    try {
      Connection connection = group_.device.is_cpu() ? connect_in_time(whole_aborts) : connect(group_, transports_);
      host_ = std::move(connection.host);
      device_ = std::move(connection.device);
      if (host_ != nullptr) worker_.emplace();
      progress_.name = GroupProgress::kConnected;
    } catch (const DistributedError&) {
      throw;
    } catch (const UsageError&) {
      throw;
    } catch (const std::exception& error) {
      fail({GroupProgress::kConnecting, 0}, error);
    }
  }

  const GroupConfig& group() const { return group_; }

  // Starts `run(backend)`, which returns c10d's Work.
  template <class Run>
  Work start(const char* name, const Run& run) {
    const Call call = begin(name);
    C10dWork work;
    try {
      work = run(*device_);
    } catch (const std::exception& error) {
      fail(call, error);
    }
    const auto end = trace::enabled() ? work->getFuture() : nullptr;  // null for NCCL's collectives of uneven parts
    if (end != nullptr) end->addCallback([trace = span_of(name)](c10::ivalue::Future&) { trace(); });
    return Work([this, call, work] { guarded(call, [&] { work->wait(); }); }, [work] { return work->isCompleted(); });
  }

  Work start_small(const at::Tensor& flat, ReduceOp op) {
    const Call call = begin("all_reduce");
    std::shared_ptr<SmallAllReduce> small;
    guarded(call, [&] { small = host_->small_all_reduce(flat, op); });
    if (!small->is_sent()) static_cast<void>(worker_->run([small] { small->finish(); }));
    return Work([this, call, small] {
      const auto trace = span_of("all_reduce");
      guarded(call, [&] { small->finish(); });
      trace();
    });
  }

  // Starts `run(transport)` on the worker.
  template <class Run>
  Work start_on_worker(const char* name, Run run) {
    const Call call = begin(name);
    const std::shared_future<void> done = worker_->run([this, run = std::move(run), trace = span_of(name)] {
      run(*host_);
      trace();
    });
    return Work([this, call, done] { guarded(call, [&] { done.get(); }); },
                [done] { return done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  }

  // Runs on the calling thread, so that it does not wait for the collectives on the worker.
  void barrier() {
    const Call call = begin("barrier");
    const auto trace = span_of("barrier");
    guarded(call, [&] { host_->barrier(); });
    trace();
  }

  bool is_on_host() const { return host_ != nullptr; }
  bool adds_in_rank_order() const { return host_ != nullptr && host_->all_reduces_in_rank_order(); }
  at::Tensor allocate_on_host(int64_t num_elements, c10::ScalarType dtype) const {
    return host_->allocate(num_elements, dtype);
  }

  void check(const at::Tensor& flat) const {
    check_flat(flat);
    TORCH_CHECK_VALUE(flat.device().type() == group_.device.type(), "group '", group_.name, "' takes tensors on ",
                      group_.device.type(), "; got one on ", flat.device(), "; pass tensor.to(\"",
                      c10::DeviceTypeName(group_.device.type(), /*lower_case=*/true), "\")");
  }

  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) {
    check_ranks(ranks, group_.world_size());
    GroupConfig sub = group_;
    sub.name = fmt::format("{}.{}", group_.name, ++num_sub_groups_);
    sub.ranks.clear();
    sub.rank = -1;
    for (const int64_t rank : ranks) {
      if (rank == group_.rank) sub.rank = static_cast<int64_t>(sub.ranks.size());
      sub.ranks.push_back(group_.ranks[static_cast<size_t>(rank)]);
    }
    if (sub.rank < 0) return nullptr;
    sub.connect_timeout = sub.timeout;  // ranks may arrive as late as at any collective
    auto group = std::make_shared<ProcessCollective>(std::move(sub), heartbeat_, transports_, aborts_.get_token());
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(sub_groups_, [](const auto& other) { return other.expired(); });
      sub_groups_.push_back(group);
    }
    if (aborts_.stop_requested()) group->abort(/*reason=*/"");  // abort() did not see this group
    return group;
  }

  // Without a reason, the call that fails first asks the Heartbeat, which knows the rank at fault.
  void abort(const std::string& reason) {
    if (!reason.empty()) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_.emplace(reason, group_.ranks[static_cast<size_t>(group_.rank)]);
    }
    aborts_.request_stop();
    break_connections();
    for (const auto& group : sub_groups()) group->abort(reason);
  }

  void break_connections() noexcept {
    try {
      host_ ? host_->abort() : device_->abort();
    } catch (const std::exception& error) {
      log_warning("group '{}' could not be aborted: {}", group_.name, error.what());
    }
  }

  // NCCL's abort() would drop work that the device has not done yet; shutdown() may wait forever after a failure.
  void end() noexcept {
    if (failed()) return break_connections();
    try {
      host_ ? host_->end() : device_->shutdown();
    } catch (const std::exception& error) {
      log_warning("group '{}' ends badly: {}", group_.name, error.what());
      break_connections();
    }
  }

 private:
  // Connects on a detached thread: Gloo waits forever for a store whose process has been stopped. The thread goes on
  // when this function throws, until Gloo's timeout or the end of the process.
  Connection connect_in_time(const std::stop_token& whole_aborts) const {
    std::future<Connection> connection =
        detached_call<Connection>([group = group_, transports = transports_] { return connect(group, transports); });
    const auto deadline = std::chrono::steady_clock::now() + group_.connect_timeout + std::chrono::milliseconds(500);
    while (connection.wait_for(kBetweenLooks) != std::future_status::ready) {
      if (whole_aborts.stop_requested()) throw std::runtime_error("the run has failed meanwhile");
      if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("the store does not answer");
    }
    return connection.get();
  }

  std::vector<std::shared_ptr<Collective>> sub_groups() {
    std::vector<std::shared_ptr<Collective>> groups;
    const std::lock_guard lock(mutex_);
    for (const auto& weak : sub_groups_) {
      if (auto group = weak.lock()) groups.push_back(std::move(group));
    }
    return groups;
  }

  // Begins a trace span; the returned function ends it.
  std::function<void()> span_of(const char* name) const {
    if (!trace::enabled()) return [] {};
    return [begin = trace::Clock::now(), name = std::string(name), lane = "group " + group_.name] {
      trace::add(name, begin, trace::Clock::now(), lane);
    };
  }

  bool failed() {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  }

  Call begin(const char* name) {
    const std::lock_guard lock(mutex_);
    if (failure_) throw *failure_;
    progress_.name = name;
    return {name, ++progress_.number};
  }

  template <class Body>
  void guarded(const Call& call, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      fail(call, error);
    }
  }

  // Only the first failure of a group is diagnosed; later failures follow from it and throw the same error.
  [[noreturn]] void fail(const Call& call, const std::exception& error) {
    const std::lock_guard only_one(failing_);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) throw *failure_;
    }
    const auto timeout = call.name == GroupProgress::kConnecting ? group_.connect_timeout : group_.timeout;
    const Diagnosis diagnosis = heartbeat_->diagnose(group_.name, call.number, group_.ranks);
    DistributedError failure(
        fmt::format("rank {}: {} (collective {} of group '{}', timeout {:%Q} s) failed: {} [{}]",
                    group_.ranks[static_cast<size_t>(group_.rank)], call.name, call.number, group_.name,
                    std::chrono::duration<double>(timeout), diagnosis.text, message_of(error)),
        diagnosis.failed_rank);
    failure.rank_is_ending = diagnosis.is_ending;
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_.emplace(failure);
    throw *failure_;
  }

  const GroupConfig group_;
  const std::shared_ptr<Heartbeat> heartbeat_;
  const std::vector<ConnectTransport> transports_;
  GroupProgress& progress_;
  int64_t num_sub_groups_ = 0;
  std::stop_source aborts_;
  std::mutex failing_;
  std::mutex mutex_;
  std::optional<DistributedError> failure_{};
  std::vector<std::weak_ptr<Collective>> sub_groups_{};
  std::unique_ptr<HostTransport> host_;       // null if the tensors are on a device
  c10::intrusive_ptr<c10d::Backend> device_;  // null if they are in host memory
  std::optional<JobQueue> worker_;            // declared last, so destroyed first: it uses all other members
};

ProcessCollective::ProcessCollective(GroupConfig group, std::shared_ptr<Heartbeat> heartbeat,
                                     std::vector<ConnectTransport> transports, const std::stop_token& whole_aborts)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(heartbeat), std::move(transports), whole_aborts)) {}

// Aborts what still runs on the CPU; otherwise the backend's threads would wait for it until the timeout.
ProcessCollective::~ProcessCollective() { impl_->end(); }

int64_t ProcessCollective::rank() const { return impl_->group().rank; }
int64_t ProcessCollective::world_size() const { return impl_->group().world_size(); }

Work ProcessCollective::all_reduce(at::Tensor flat, ReduceOp op) {
  impl_->check(flat);
  op = number_op(flat, op);
  flat = as_numbers(flat);
  if (impl_->is_on_host()) {
    if (is_small(flat, world_size())) return impl_->start_small(flat, op);
    return impl_->start_on_worker("all_reduce",
                                  [flat, op](HostTransport& transport) { transport.all_reduce(flat, op); });
  }
  return impl_->start("all_reduce", [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{flat};
    return backend.allreduce(tensors, {.reduceOp = c10d_op(op), .timeout = impl_->group().timeout});
  });
}

bool ProcessCollective::adds_in_rank_order() const { return impl_->adds_in_rank_order(); }

Work ProcessCollective::reduce_scatter(at::Tensor flat, ReduceOp op, at::Tensor into) {
  impl_->check(flat);
  if (into.defined()) {
    check_into(into, rank_range(flat.numel(), rank(), world_size()).of(flat));
    into = as_numbers(into);
  }
  op = number_op(flat, op);
  flat = as_numbers(flat);
  if (!into.defined()) into = rank_range(flat.numel(), rank(), world_size()).of(flat);
  if (impl_->is_on_host()) {
    return impl_->start_on_worker("reduce_scatter",
                                  [flat, op, into, ranges = RankRanges::of_whole(flat, world_size())](
                                      HostTransport& transport) { transport.reduce_scatter(flat, op, into, ranges); });
  }
  return impl_->start("reduce_scatter", [&](c10d::Backend& backend) {
    const c10d::ReduceScatterOptions options{.reduceOp = c10d_op(op), .timeout = impl_->group().timeout};
    at::Tensor input = flat;
    if (flat.numel() % world_size() == 0) return backend._reduce_scatter_base(into, input, options);
    std::vector<at::Tensor> outputs{into};
    std::vector<std::vector<at::Tensor>> inputs{parts_of(flat, world_size())};
    return backend.reduce_scatter(outputs, inputs, options);
  });
}

Work ProcessCollective::all_gather(at::Tensor flat) {
  impl_->check(flat);
  flat = as_numbers(flat);
  if (impl_->is_on_host()) {
    return impl_->start_on_worker("all_gather", [flat, ranges = RankRanges::of_whole(flat, world_size())](
                                                    HostTransport& transport) { transport.all_gather(flat, ranges); });
  }
  return impl_->start("all_gather", [&](c10d::Backend& backend) {
    const c10d::AllgatherOptions options{.timeout = impl_->group().timeout};
    std::vector<at::Tensor> parts = parts_of(flat, world_size());
    at::Tensor mine = parts[static_cast<size_t>(rank())];
    if (flat.numel() % world_size() == 0) return backend._allgather_base(flat, mine, options);
    std::vector<at::Tensor> inputs{mine};
    std::vector<std::vector<at::Tensor>> outputs{parts};
    return backend.allgather(outputs, inputs, options);
  });
}

Work ProcessCollective::broadcast(at::Tensor flat, int64_t root) {
  impl_->check(flat);
  check_root(root, world_size());
  flat = as_numbers(flat);
  if (impl_->is_on_host()) {
    return impl_->start_on_worker("broadcast",
                                  [flat, root](HostTransport& transport) { transport.broadcast(flat, root); });
  }
  return impl_->start("broadcast", [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{flat};
    return backend.broadcast(tensors, {.rootRank = root, .timeout = impl_->group().timeout});
  });
}

void ProcessCollective::barrier() {
  if (impl_->is_on_host()) return impl_->barrier();
  at::Tensor nothing = at::zeros({1}, at::TensorOptions(at::kFloat).device(impl_->group().device));
  all_reduce(nothing).wait();
  nothing.item();  // until here the host has not waited
}

at::Tensor ProcessCollective::allocate(int64_t num_elements, const at::TensorOptions& options) {
  return impl_->is_on_host() ? impl_->allocate_on_host(num_elements, c10::typeMetaToScalarType(options.dtype()))
                             : Collective::allocate(num_elements, options);
}

std::shared_ptr<Collective> ProcessCollective::sub_group(const std::vector<int64_t>& ranks) {
  return impl_->sub_group(ranks);
}

void ProcessCollective::abort(const std::string& reason) noexcept { impl_->abort(reason); }

}  // namespace fulgur
