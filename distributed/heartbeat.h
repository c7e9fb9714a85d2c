#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fulgur {

// Who is at fault when a collective does not come to an end.
struct Diagnosis {
  std::optional<int64_t> failed_rank;  // unset: nobody can tell
  std::string text;                    // "rank 2 gives no sign of life; it was last seen at step 12, in collective 16"
  bool is_ending = false;              // that rank has reported it itself: it tidies up, and ends
};

// The collectives of one group that a rank has started.
struct Progress {
  std::atomic<int64_t> number{0};
  std::atomic<const char*> name{""};  // of the last one: "all_reduce"
};

// Writes to the store, at intervals and from a thread of its own, that this rank is alive, its step, and which
// collectives it has started in each group; so that, when one fails, the others can name the rank that is missing.
// The first rank to fail leaves a record there, which every other rank then reports: all name the same cause.
// A rank that watches learns of a failure even while nothing here fails or returns, as where the host waits for a GPU
// that waits for a rank which is gone.
// Any thread may call it. No call waits longer than a few intervals, even if the store does not answer; once it has not
// answered, none waits.
class Heartbeat {
 public:
  // `store` must be a connection that nobody else waits on (Store::clone()). `store_rank`: the rank in whose process
  // the store lives; unset if it outlives the ranks.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int64_t rank, std::optional<int64_t> store_rank,
            std::chrono::milliseconds interval);
  ~Heartbeat();  // tells that this rank has left
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  void set_step(int64_t global_step);

  // This rank has done its work, and waits for the others.
  void set_at_end();

  // From now on, once per interval, looks for a record of failure, and at the heart of the next of `num_ranks` ranks:
  // of one that has stood still for kSilentIntervals it leaves a record itself. Calls `on_failure` then, or when the
  // store does not answer for so long, once, from a thread of its own. Not after set_at_end().
  void watch(int64_t num_ranks, std::function<void()> on_failure);
  static constexpr int64_t kSilentIntervals = 150;  // a minute, at the default interval

  // Of this rank; valid as long as the Heartbeat.
  Progress& progress(const std::string& group);

  // This rank has failed, for a reason of its own: the record, unless another rank came first.
  void report_failure(const std::string& message);

  // Why collective `number` of `group` failed. Takes two to four intervals, unless a rank has left a record.
  Diagnosis diagnose(const std::string& group, int64_t number, const std::vector<int64_t>& ranks);

  // In the process of the store, after a failure: returns when these ranks have left or ended, so that they can read
  // the record, or after a few seconds.
  void wait_for_others(const std::vector<int64_t>& ranks);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // also held by the thread, which may hang in the store when the Heartbeat goes
};

}  // namespace fulgur
