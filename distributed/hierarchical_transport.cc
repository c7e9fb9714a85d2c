#include "fulgur/distributed/hierarchical_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <numeric>
#include <set>
#include <utility>

#include "fulgur/base/logging.h"
#include "fulgur/distributed/gloo_transport.h"
#include "fulgur/distributed/shared_memory.h"
#include "fulgur/distributed/shared_memory_transport.h"

namespace fulgur {
namespace {

constexpr int64_t kChunkBytes = 4 << 20;  // the parts of all hosts together have this size

// Warns once per process, for all groups, if hosts have several ranks, but not alike.
void warn_of_placement(const std::vector<std::string>& hosts) {
  const std::set<std::string> different(hosts.begin(), hosts.end());
  if (different.size() == 1 || different.size() == hosts.size()) return;
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  log_warning(
      "every rank exchanges with every other over the network, which sends more bytes than it needs to: {} ranks are "
      "on {} hosts, not as many on each, or not one host's after another's; give every host as many ranks, with "
      "consecutive numbers",
      hosts.size(), different.size());
}

}  // namespace

std::optional<int64_t> ranks_per_host(const std::vector<std::string>& hosts) {
  const auto end_of_first = std::ranges::find_if(hosts, [&](const std::string& host) { return host != hosts.front(); });
  const int64_t size = end_of_first - hosts.begin();
  if (size < 2 || end_of_first == hosts.end() || std::ssize(hosts) % size != 0) return std::nullopt;
  std::set<std::string> seen;
  for (auto block = hosts.begin(); block != hosts.end(); block += size) {
    const bool is_of_one_host = std::count(block, block + size, *block) == size;
    if (!is_of_one_host || !seen.insert(*block).second) return std::nullopt;
  }
  return size;
}

std::unique_ptr<HostTransport> connect_hierarchy(const GroupConfig& group) {
  return group.transport.kind == TransportKind::automatic ? connect_two_levels(group, connect_gloo) : nullptr;
}

std::unique_ptr<HostTransport> connect_two_levels(
    const GroupConfig& group, const std::function<std::unique_ptr<HostTransport>(const GroupConfig&)>& connect_across) {
  if (!group.device.is_cpu()) return nullptr;
  const auto identity = group.transport.shared_memory ? host_identity(group.transport) : std::nullopt;
  const std::vector<std::string> hosts = exchange_texts(group, "hosts", identity.value_or(""));
  const bool some_host_is_unknown = std::ranges::find(hosts, "") != hosts.end();
  const std::optional<int64_t> size = some_host_is_unknown ? std::nullopt : ranks_per_host(hosts);
  if (!size) {
    if (!some_host_is_unknown && group.rank == 0 && group.name == "data") warn_of_placement(hosts);
    return nullptr;
  }
  const int64_t num_hosts = group.world_size() / *size;
  std::vector<int64_t> on_this_host(static_cast<size_t>(*size)), in_this_place;
  std::iota(on_this_host.begin(), on_this_host.end(), group.rank / *size * *size);
  for (int64_t host = 0; host < num_hosts; ++host) in_this_place.push_back(host * *size + group.rank % *size);
  GroupConfig within = group.part(fmt::format("host{}", group.rank / *size), on_this_host);
  within.transport.kind = TransportKind::automatic;
  auto on_host = connect_shared_memory(within);
  const std::vector<std::string> share = exchange_texts(group, "share", on_host != nullptr ? "yes" : "no");
  if (std::ranges::count(share, "yes") != group.world_size()) return nullptr;
  GroupConfig across = group.part(fmt::format("place{}", group.rank % *size), in_this_place);
  across.transport.rank_order_all_reduce = true;
  return std::make_unique<HierarchicalTransport>(std::move(on_host), connect_across(across), group.rank, *size,
                                                 num_hosts, group.transport.staging_bytes.value_or(kChunkBytes));
}

HierarchicalTransport::HierarchicalTransport(std::unique_ptr<HostTransport> on_host,
                                             std::unique_ptr<HostTransport> across, int64_t rank,
                                             int64_t ranks_per_host, int64_t num_hosts, int64_t chunk_bytes)
    : on_host_(std::move(on_host)),
      across_(std::move(across)),
      place_(rank % ranks_per_host),
      host_(rank / ranks_per_host),
      ranks_per_host_(ranks_per_host),
      num_hosts_(num_hosts),
      chunk_bytes_(chunk_bytes) {}

// For each chunk of every rank's range, calls `before`, then `between_hosts` on a separate thread while `before` runs
// for the next chunk, then `after`.
void HierarchicalTransport::in_chunks(const at::Tensor& flat, const RankRanges& ranges, const Step& before,
                                      const Step& between_hosts, const Step& after) {
  const int64_t chunk_size = std::max<int64_t>(chunk_bytes_ / (num_hosts_ * flat.element_size()), 1);
  std::shared_future<void> running;
  RankRanges previous;
  const auto finish_previous = [&] {
    if (running.valid()) running.get();
  };
  try {
    for (int64_t begin = 0; begin < ranges.size; begin += chunk_size) {
      const RankRanges chunk{ranges.first + begin, ranges.stride, std::min(chunk_size, ranges.size - begin)};
      before(chunk);
      finish_previous();
      const bool is_first = !running.valid();
      running = between_hosts_.run([&between_hosts, chunk] { between_hosts(chunk); });
      if (!is_first) after(previous);
      previous = chunk;
    }
    finish_previous();
    if (running.valid()) after(previous);
  } catch (...) {
    abort();  // ends the job between hosts, which uses tensors of the caller
    if (running.valid()) running.wait();
    throw;
  }
}

// The parts of a chunk that belong to the ranks of one host, by their places there.
RankRanges HierarchicalTransport::of_host(int64_t host, const RankRanges& chunk) const {
  return {chunk.first + host * ranks_per_host_ * chunk.stride, chunk.stride, chunk.size};
}

// The parts of a chunk that belong to the ranks in this rank's place, by their hosts.
RankRanges HierarchicalTransport::across_hosts(const RankRanges& chunk) const {
  return {chunk.first + place_ * chunk.stride, ranks_per_host_ * chunk.stride, chunk.size};
}

// Leaves this host's sums for the ranks in this rank's place where their parts of the tensor are.
void HierarchicalTransport::add_up_on_host(const at::Tensor& flat, ReduceOp op, const RankRanges& chunk) {
  for (int64_t host = 0; host < num_hosts_; ++host) {
    const RankRanges parts = of_host(host, chunk);
    on_host_->reduce_scatter(flat, op, parts.of(flat, place_), parts);
  }
}

void HierarchicalTransport::gather_on_host(const at::Tensor& flat, const RankRanges& chunk) {
  for (int64_t host = 0; host < num_hosts_; ++host) on_host_->all_gather(flat, of_host(host, chunk));
}

// After an error the group is dead, on the other ranks, too.
template <class Body>
void HierarchicalTransport::run(const Body& body) {
  try {
    body();
  } catch (...) {
    abort();
    throw;
  }
}

void HierarchicalTransport::reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into,
                                           const RankRanges& ranges) {
  const int64_t rank = host_ * ranks_per_host_ + place_;
  in_chunks(
      flat, ranges, [&](const RankRanges& chunk) { add_up_on_host(flat, op, chunk); },
      [&](const RankRanges& chunk) {
        const int64_t begin = std::min(chunk.first - ranges.first, into.numel());
        const at::Tensor part = into.narrow(0, begin, chunk.range(rank, flat).size());
        across_->reduce_scatter(flat, op, part, across_hosts(chunk));
      },
      [](const RankRanges&) {});
}

void HierarchicalTransport::all_gather(const at::Tensor& flat, const RankRanges& ranges) {
  in_chunks(
      flat, ranges, [](const RankRanges&) {},
      [&](const RankRanges& chunk) { across_->all_gather(flat, across_hosts(chunk)); },
      [&](const RankRanges& chunk) { gather_on_host(flat, chunk); });
}

void HierarchicalTransport::all_reduce(const at::Tensor& flat, ReduceOp op) {
  in_chunks(
      flat, RankRanges::of_whole(flat, num_hosts_ * ranks_per_host_),
      [&](const RankRanges& chunk) { add_up_on_host(flat, op, chunk); },
      [&](const RankRanges& chunk) {
        const RankRanges parts = across_hosts(chunk);
        across_->reduce_scatter(flat, op, parts.of(flat, host_), parts);
        across_->all_gather(flat, parts);
      },
      [&](const RankRanges& chunk) { gather_on_host(flat, chunk); });
}

void HierarchicalTransport::broadcast(const at::Tensor& flat, int64_t root) {
  run([&] {
    const int64_t place_of_root = root % ranks_per_host_;
    if (place_ == place_of_root) across_->broadcast(flat, root / ranks_per_host_);
    on_host_->broadcast(flat, place_of_root);
  });
}

// A rank that has left the barrier of its host knows that all ranks of the host have arrived; the barrier across hosts
// tells it the same of the other hosts.
void HierarchicalTransport::barrier() {
  run([&] {
    on_host_->barrier();
    across_->barrier();
  });
}

// Hosts exchange the sums of their ranks.
std::shared_ptr<SmallAllReduce> HierarchicalTransport::small_all_reduce(const at::Tensor& flat, ReduceOp op) {
  return small_.start([&] {
    return [this, flat, op, of_host = on_host_->small_all_reduce(flat, op)] {
      run([&] {
        of_host->finish();
        across_->small_all_reduce(flat, op)->finish();
      });
    };
  });
}

void HierarchicalTransport::abort() {
  on_host_->abort();
  across_->abort();
}

void HierarchicalTransport::end() {
  on_host_->end();
  across_->end();
}

}  // namespace fulgur
