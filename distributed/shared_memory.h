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

#include "distributed/group.h"

namespace fulgur {

// Memory that the ranks of a group on one host have in common, in which they exchange bytes in rounds, on several
// channels. In a round of a channel every rank puts something into its outbox, then reads those of the others. A rank
// may put in up to kOutboxes rounds before it has read the first of them.
// No name of it is left anywhere: it goes with the last process that has it.
class SharedMemory {
 public:
  static constexpr int64_t kOutboxes = 4;  // of each rank on each channel

  struct ChannelOptions {
    int64_t outbox_bytes = 0;
    std::chrono::microseconds spin{};  // how long one waits in a round before it gives its core away
  };

  using Clock = std::chrono::steady_clock;
  class Channel;

  // Every rank of the group calls this. Null, on every rank, if they are on several hosts, if one may not see another's
  // memory (of which rank 0 warns), or if one is not `willing`. Throws what the store does if a rank does not come
  // within the group's timeout.
  static std::shared_ptr<SharedMemory> connect(const Group& group, const std::vector<ChannelOptions>& channels,
                                               bool willing);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  Channel& channel(size_t index) { return *channels_[index]; }
  int64_t rank() const { return rank_; }
  int64_t world_size() const { return static_cast<int64_t>(ranks_.size()); }

  // Whoever waits throws, on every rank. From any thread.
  void abort();

 private:
  struct Header;

  explicit SharedMemory(const Group& group);
  bool map(int descriptor, size_t num_bytes, const std::vector<ChannelOptions>& channels);
  bool watch(int process);
  void wait_until(uint32_t& counter, uint32_t least, Clock::time_point deadline, Clock::time_point end_of_spin) const;
  std::optional<std::string> trouble(Clock::time_point deadline) const;

  const int64_t rank_;
  const std::vector<int64_t> ranks_;  // numbers in the run
  size_t num_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<pollfd> processes_;  // by rank: becomes readable when its process has ended
  std::vector<std::unique_ptr<Channel>> channels_;
};

// Used by one thread at a time; one may also send while another receives. What waits throws std::runtime_error: after
// the deadline, after abort(), or when the process of another rank has ended.
class SharedMemory::Channel {
 public:
  // A call that all ranks make, for the error when they do not.
  struct Call {
    std::string_view name;
    int64_t num_bytes = 0;
  };

  Channel(SharedMemory& shared, std::byte* memory, ChannelOptions options);

  int64_t outbox_bytes() const { return options_.outbox_bytes; }

  // This rank's outbox of the next round, to be filled: once every rank is done with what was in it.
  std::byte* open(Clock::time_point deadline);
  bool opens_at_once() const;
  void send(const Call& call);

  // The outbox of a peer in the oldest round that this rank is not done with, once it has been sent.
  std::byte* receive(int64_t peer, const Call& call, Clock::time_point deadline);
  void done();

  static size_t num_bytes(int64_t world_size, ChannelOptions options);  // of its memory

 private:
  struct Counters;
  struct Outbox;

  uint32_t rounds_to_be_done() const;
  Counters& counters(int64_t rank) const;
  Outbox& outbox(int64_t rank, uint32_t round) const;

  SharedMemory& shared_;
  std::byte* const memory_;
  const ChannelOptions options_;
  uint32_t num_sent_;  // rounds
  uint32_t num_done_;
  uint32_t spun_for_;  // the round that end_of_spin_ belongs to
  Clock::time_point end_of_spin_{};
};

}  // namespace fulgur
