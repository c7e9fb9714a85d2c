#include "tools/scaling/replay.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace fulgur::scaling {
namespace {

double halvings(int64_t n) { return n > 1 ? std::ceil(std::log2(static_cast<double>(n))) : 0.0; }

// The bytes that a rank of a ring sends, over the bytes of the exchange.
double share_sent(Exchange exchange, int64_t ranks) {
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  switch (exchange) {
    case Exchange::all_reduce:
      return 2 * others;
    case Exchange::reduce_scatter:
    case Exchange::all_gather:
      return others;
    case Exchange::broadcast:
      return ranks > 1 ? 1.0 : 0.0;
  }
  return 0.0;
}

// The bytes that a rank reads and writes in the memory that it shares with the others, over those of the exchange.
double traffic(Exchange exchange, int64_t ranks) {
  if (ranks == 1) return 0.0;
  const double own = 1.0 / static_cast<double>(ranks), others = 1.0 - own;
  const double sum = 3 * others + 2 * own, hand_out = 2 * own + 2 * others;
  switch (exchange) {
    case Exchange::all_reduce:
      return sum + hand_out;
    case Exchange::reduce_scatter:
      return sum;
    case Exchange::all_gather:
    case Exchange::broadcast:
      return hand_out;
  }
  return 0.0;
}

// The clock of a step.
class Player {
 public:
  Player(const RecordedStep& recorded, const Workload& workload, const Machine& machine, int64_t ranks)
      : recorded_(recorded), workload_(workload), machine_(machine), ranks_(ranks) {}

  StepTime play() {
    const auto& events = recorded_.events;
    const auto visit = [this](const Event& event) { happen(event); };
    const auto last = std::ranges::find(events, Event::Kind::again, &Event::kind);
    if (workload_.micro_batches > 1) TORCH_CHECK(last != events.end(), "the recorded step has a single micro-batch");
    for (int64_t m = 1; m < workload_.micro_batches; ++m) std::for_each(events.begin(), last, visit);
    std::for_each(last == events.end() ? events.begin() : last, events.end(), visit);
    result_.step_s = training();
    result_.exposed_s = std::max(0.0, result_.step_s - result_.compute_s - update_of_training_);
    return result_;
  }

 private:
  double& training() { return now_[0]; }

  // What comes after an event of a background thread in the list has waited for it.
  void happen(const Event& event) {
    double& now = now_[event.lane];
    if (event.lane == 0) now = std::max(now, in_background_);
    switch (event.kind) {
      case Event::Kind::forward:
        compute(now, workload_.forward_flops, 1.0 / 3);
        break;
      case Event::Kind::gradient: {
        const double share = static_cast<double>(event.num_elements) / static_cast<double>(recorded_.num_params);
        compute(now, workload_.backward_flops * share, 2.0 / 3 * share);
        break;
      }
      case Event::Kind::launch:
        launch(now, event);
        break;
      case Event::Kind::wait:
        now = std::max(now, exchanges_[event.id].done_s);
        if (event.lane > 0 && workload_.updates_on_host && event.scope == Scope::world) copy_down(now, event.id);
        break;
      case Event::Kind::update:
        if (event.lane > 0) now = std::max(now, training());
        update(now, event.lane);
        break;
      case Event::Kind::backward:
      case Event::Kind::again:
      case Event::Kind::end:
        break;
    }
    if (event.lane > 0) in_background_ = std::max(in_background_, now);
  }

  void compute(double& now, double flops, double share_of_traffic) {
    const double seconds = flops / machine_.device.flops_per_s * machine_.turns(ranks_) +
                           memory_s(share_of_traffic * workload_.extra_step_bytes * workload_.num_params);
    now += seconds;
    result_.compute_s += seconds;
  }

  // The ranks of a host share its memory if they compute on its cores.
  double memory_s(double num_bytes) const {
    const double sharing =
        machine_.cores_per_host > 0 ? static_cast<double>(std::min(ranks_, machine_.ranks_per_host)) : 1.0;
    return num_bytes * sharing / machine_.device.memory_bytes_per_s;
  }

  double scaled(const Event& event) const {
    if (event.scope == Scope::control) return static_cast<double>(event.num_bytes);
    return static_cast<double>(event.num_bytes) / static_cast<double>(recorded_.num_params * recorded_.element_bytes) *
           workload_.num_params * workload_.param_bytes;
  }

  // Updated parameters come to the device before they are gathered.
  void launch(double& now, const Event& event) {
    double num_bytes = scaled(event);
    if (event.scope == Scope::across) {  // a shard of a bucket, which was recorded with fewer shards
      num_bytes *= static_cast<double>(recorded_.shards) / static_cast<double>(workload_.shards);
    }
    if (workload_.updates_on_host && event.exchange == Exchange::all_gather && event.scope == Scope::world) {
      up_free_ = std::max(up_free_, now) + to_host_s(num_bytes / static_cast<double>(workload_.shards));
    }
    const ExchangeCost cost = cost_of(event.exchange, event.scope, num_bytes, ranks_, workload_.shards, machine_);
    result_.bytes_within += cost.bytes_within;
    result_.bytes_between += cost.bytes_between;
    double& free = link_free_[event.scope];
    const bool comes_up = workload_.updates_on_host && event.exchange == Exchange::all_gather;
    const double begin = std::max({now, free, comes_up ? up_free_ : 0.0});
    free = begin + cost.seconds;
    if (!machine_.has_core_for_exchanges(ranks_)) now = free;
    exchanges_[event.id] = {.done_s = free, .num_bytes = num_bytes};
  }

  double to_host_s(double num_bytes) {
    result_.bytes_to_host += num_bytes;
    return num_bytes / machine_.device.to_host_bytes_per_s;
  }

  void copy_down(double& now, int64_t id) {
    now += to_host_s(exchanges_[id].num_bytes / static_cast<double>(workload_.shards));
  }

  // Pieces count as equally large: only the sum over them matters for a step's time, but for the last bucket's.
  void update(double& now, int64_t lane) {
    const double elements = workload_.num_params / static_cast<double>(workload_.shards);
    const double num_bytes = elements * workload_.update_bytes / static_cast<double>(recorded_.num_updates);
    const double seconds =
        workload_.updates_on_host ? num_bytes / machine_.device.host_bytes_per_s : memory_s(num_bytes);
    now += seconds;
    result_.update_s += seconds;
    if (lane == 0) update_of_training_ += seconds;
  }

  struct Exchanged {
    double done_s = 0;
    double num_bytes = 0;
  };

  const RecordedStep& recorded_;
  const Workload& workload_;
  const Machine& machine_;
  const int64_t ranks_;
  std::map<int64_t, double> now_;  // by lane
  std::map<int64_t, Exchanged> exchanges_;
  std::map<Scope, double> link_free_;
  double up_free_ = 0, in_background_ = 0, update_of_training_ = 0;
  StepTime result_;
};

}  // namespace

ExchangeCost cost_of(Exchange exchange, Scope scope, double num_bytes, int64_t ranks, int64_t shards,
                     const Machine& machine) {
  int64_t members = ranks, on_host = std::min(ranks, machine.ranks_per_host);
  int64_t rings_of_host = 1;  // groups that send through the link of a host at once
  if (scope == Scope::within) {
    members = shards;
    on_host = std::min(shards, machine.ranks_per_host);
  } else if (scope == Scope::across) {
    members = ranks / shards;
    on_host = std::max<int64_t>(1, std::min(ranks, machine.ranks_per_host) / shards);
    rings_of_host = std::min(shards, machine.ranks_per_host);
  }
  const int64_t hosts = (members + on_host - 1) / on_host;
  const double sent = num_bytes * share_sent(exchange, members);
  ExchangeCost cost;
  const double on_wire = hosts > 1 ? sent * static_cast<double>(rings_of_host) : 0.0;
  if (on_host > 1) cost.bytes_within = sent;
  cost.bytes_between = on_wire;
  if (machine.cores_per_host > 0 && hosts == 1) {  // through memory, which the members share
    cost.seconds =
        num_bytes * traffic(exchange, members) * static_cast<double>(members) / machine.device.memory_bytes_per_s;
    if (members > 1) cost.seconds += halvings(members) * machine.within.latency_s;
    return cost;
  }
  const double within_s = on_host > 1 ? sent / machine.within.bytes_per_s : 0.0;
  const double between_s = hosts > 1 ? on_wire / machine.between.bytes_per_s : 0.0;
  cost.seconds = std::max(within_s, between_s) + halvings(on_host) * machine.within.latency_s +
                 halvings(hosts) * machine.between.latency_s;
  return cost;
}

StepTime replay(const RecordedStep& recorded, const Workload& workload, const Machine& machine, int64_t ranks) {
  return Player(recorded, workload, machine, ranks).play();
}

}  // namespace fulgur::scaling
