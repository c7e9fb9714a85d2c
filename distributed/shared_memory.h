#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/distributed/group.h"

namespace fulgur {

// Equal for two processes that run on one host and see the same process numbers; none if the host does not say.
std::optional<std::string> host_identity(const TransportOptions& options);

// Memory shared by the ranks of a group on one host, in which they exchange bytes in rounds, on several channels. In a
// round of a channel every rank fills its outbox, then reads those of the others. A rank may fill up to kOutboxes
// rounds before it has read the first of them. The memory has no name in the file system: it is freed with the last
// process that maps it.
class SharedMemory {
 public:
  static constexpr int64_t kOutboxes = 4;  // per rank and channel

  struct ChannelOptions {
    int64_t outbox_bytes = 0;
    std::chrono::microseconds spin{};  // how long a rank polls in a round before it yields its core
  };

  using Clock = std::chrono::steady_clock;
  class Channel;

  // Every rank of the group calls this. Returns null, on every rank, if the ranks are on several hosts, if one may not
  // see another's memory (rank 0 then logs a warning), or if one is not `willing`. If the group's options ask for
  // shared memory, it throws UsageError instead, which says which ranks cannot use it and why. Throws what the store
  // throws if a rank does not join within the group's timeout.
  static std::shared_ptr<SharedMemory> connect(const GroupConfig& group, const std::vector<ChannelOptions>& channels,
                                               bool willing);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  Channel& channel(size_t index) { return *channels_[index]; }
  int64_t rank() const { return rank_; }
  int64_t world_size() const { return static_cast<int64_t>(ranks_.size()); }

  // Makes every rank that waits throw. Threading: any thread.
  void abort();

 private:
  struct Header;

  explicit SharedMemory(const GroupConfig& group);
  bool map(int descriptor, size_t num_bytes, const std::vector<ChannelOptions>& channels);
  bool watch(int process);
  void wait_until(uint32_t& counter, uint32_t least, Clock::time_point deadline, Clock::time_point end_of_spin) const;
  std::optional<std::string> trouble(Clock::time_point deadline) const;

  const int64_t rank_;
  const std::vector<int64_t> ranks_;  // global ranks
  size_t num_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<pollfd> processes_;  // by rank; becomes readable when the process has ended
  std::vector<std::unique_ptr<Channel>> channels_;
};

// A sequence of rounds. Threading: one thread at a time; one thread may send while another receives. Errors: waiting
// calls throw std::runtime_error after the deadline, after abort(), or when the process of another rank has ended.
class SharedMemory::Channel {
 public:
  // A call that all ranks must make alike; a mismatch is an error that names both calls.
  struct Call {
    std::string_view name;
    int64_t num_bytes = 0;
  };

  Channel(SharedMemory& shared, std::byte* memory, ChannelOptions options);

  int64_t outbox_bytes() const { return options_.outbox_bytes; }

  // Returns this rank's outbox of the next round, to be filled; waits until every rank has read its previous content.
  std::byte* open(Clock::time_point deadline);
  bool opens_at_once() const;
  void send(const Call& call);

  // Returns the outbox of a peer in the oldest round for which this rank has not called done(); waits until it is sent.
  std::byte* receive(int64_t peer, const Call& call, Clock::time_point deadline);
  void done();

  static size_t num_bytes(int64_t world_size, ChannelOptions options);  // bytes of its shared memory

 private:
  struct Counters;
  struct Outbox;

  uint32_t rounds_to_be_done() const;
  Counters& counters(int64_t rank) const;
  Outbox& outbox(int64_t rank, uint32_t round) const;

  SharedMemory& shared_;
  std::byte* const memory_;
  const ChannelOptions options_;
  uint32_t num_sent_;  // number of rounds
  uint32_t num_done_;
  uint32_t spun_for_;  // the round to which end_of_spin_ belongs
  Clock::time_point end_of_spin_{};
};

}  // namespace fulgur
