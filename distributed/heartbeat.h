#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fulgur {

// Which rank is at fault when a collective does not complete.
struct Diagnosis {
  std::optional<int64_t> failed_rank;  // nullopt if unknown
  std::string text;                    // "rank 2 gives no sign of life; it was last seen at step 12, in collective 16"
  bool is_ending = false;              // the failed rank reported the failure itself, cleans up and ends
};

// The collectives of one group that a rank has started.
struct GroupProgress {
  static constexpr const char *kConnecting = "connecting", *kConnected = "connected";  // names before the first one

  std::atomic<int64_t> number{0};
  std::atomic<const char*> name{""};  // name of the last collective: "all_reduce"
};

// Writes to the store, at intervals and from a background thread, that this rank is alive, its step, and which
// collectives it has started in each group; when a collective fails, the other ranks can then name the missing rank.
// The first rank to fail leaves a record in the store, which every other rank reports: all ranks name the same cause. A
// watching rank learns of a failure even while no call fails or returns, for example when the host waits for a GPU that
// waits for a rank which has gone. Threading: any thread. No call waits longer than 2.5 s and a few intervals for the
// store; after the store has failed to answer, no call waits.
class Heartbeat {
 public:
  // `store` must be a separate connection (Store::clone()) on which no other code waits. `store_rank`: the rank in
  // whose process the store lives; nullopt if the store outlives the ranks. `timeout`: how long a watched rank, or the
  // store, may be silent.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int64_t rank, std::optional<int64_t> store_rank,
            std::chrono::milliseconds interval, std::chrono::milliseconds timeout);
  ~Heartbeat();  // records that this rank has left
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  void set_step(int64_t global_step);

  // Records that this rank has finished its work and waits for the others. It still watches: another rank may never
  // come. From now on a store that has gone counts as a failure only after the timeout, because the rank that keeps it
  // may be the first to end.
  void set_at_end();

  // To be called when no other rank is needed any more: what happens to them now is no failure of this one.
  void stop_watching();

  // Starts watching: once per interval, looks for a record of failure and checks the heartbeat of the next of
  // `num_ranks` ranks. A rank without a beat for the timeout is recorded as failed. Calls `on_failure` once, from a
  // background thread, when there is a record or the store does not answer for that time; never after stop_watching().
  void watch(int64_t num_ranks, std::function<void()> on_failure);

  // This rank's progress in a group; the reference is valid as long as the Heartbeat.
  GroupProgress& progress(const std::string& group);

  // Records that this rank has failed by itself, unless another rank's record came first.
  void report_failure(const std::string& message);

  // Why collective `number` of `group` failed. Takes two to four intervals, unless a rank has left a record; while
  // another rank looks for the cause, up to 0.8 s and three intervals more.
  Diagnosis diagnose(const std::string& group, int64_t number, const std::vector<int64_t>& ranks);

  // One sentence per rank for the report of a failure: "rank 1 was seen at step 12, in collective 16 of group 'data'
  // (all_reduce)". This rank is described as it is now, the others as the last diagnosis saw them; without a diagnosis
  // the result is this rank alone.
  std::vector<std::string> places();

  // The last call in a run without errors, after every rank has finished: stops the heartbeat. In the process of the
  // store, first waits, for at most two intervals, until the other ranks have stopped theirs: they would find the store
  // gone.
  void leave(const std::vector<int64_t>& ranks);

  // To be called after a failure. In the process of the store, returns when these ranks have left or ended, so that
  // they can read the record, or after a few seconds; elsewhere, returns at once.
  void wait_for_others(const std::vector<int64_t>& ranks);

 private:
  struct Shared;
  void stop();

  std::shared_ptr<Shared> shared_;  // shared with the thread, which may outlive the Heartbeat if it hangs in the store
  std::future<void> ended_;
};

}  // namespace fulgur
