#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fulgur/distributed/collective.h"

namespace fulgur::scaling {

enum class Exchange { all_reduce, reduce_scatter, all_gather, broadcast };

// The ranks that an exchange is between. A sub-group of consecutive ranks is `within` a group of shards; other
// sub-groups are `across` such groups. `control` is the world's group for small messages.
enum class Scope { world, within, across, control };

// What a rank did, in the order in which it did so.
struct Event {
  enum class Kind {
    forward,   // training_step() begins
    gradient,  // backward has a gradient of num_elements
    backward,  // backward() has returned
    launch,    // an exchange of num_bytes is started; `id` is its number
    wait,      // the exchange `id` is completed, as far as this thread knows
    update,    // the optimizer updates a piece of a parameter
    again,     // a micro-batch has ended that is not the last of its step
    end,       // the step has returned
  };
  Kind kind = Kind::forward;
  int64_t lane = 0;  // 0: the training thread; background threads count from 1, in the order of their first event
  int64_t id = 0;
  Exchange exchange = Exchange::all_reduce;
  Scope scope = Scope::world;
  int64_t num_bytes = 0;  // the whole tensor, before it is divided among ranks
  int64_t num_elements = 0;

  bool operator==(const Event&) const = default;
};

// Collects the events of one rank. With `lazily` an event of a background thread happens only when all other threads of
// the process are asleep: whatever comes after it in the list needed it, and whatever comes before did not. So the list
// says what each event of the training thread depends on, without knowing why.
// Threading: any thread; the first one that records is the training thread.
class Recorder {
 public:
  explicit Recorder(bool lazily) : lazily_(lazily) {}

  // Adds an event of the calling thread. Fills in its lane and, of a launch, the number, which is returned. Throws
  // c10::Error if the other threads never sleep.
  int64_t add(Event event);

  // Returns the events since the last call.
  std::vector<Event> take();

 private:
  void await_quiet(std::unique_lock<std::mutex>& lock);

  const bool lazily_;
  std::mutex mutex_;
  std::condition_variable served_;
  std::vector<std::thread::id> threads_;  // by lane
  std::vector<Event> events_;
  int64_t num_ids_ = 0;
  int64_t next_ticket_ = 0, serving_ = 0;
};

// A Collective that records launches and waits. Without an inner one it is a rank of a group whose other ranks are
// imagined: each passes what this rank passes, so that sums are world_size times its own.
// Ownership: shares the recorder and the inner Collective. Threading: as any Collective.
class RecordingCollective final : public Collective {
 public:
  RecordingCollective(std::shared_ptr<Recorder> recorder, Scope scope, int64_t rank, int64_t world_size)
      : recorder_(std::move(recorder)), scope_(scope), rank_(rank), world_size_(world_size) {}
  RecordingCollective(std::shared_ptr<Recorder> recorder, Scope scope, std::shared_ptr<Collective> inner)
      : recorder_(std::move(recorder)),
        inner_(std::move(inner)),
        scope_(scope),
        rank_(inner_->rank()),
        world_size_(inner_->world_size()) {}

  int64_t rank() const override { return rank_; }
  int64_t world_size() const override { return world_size_; }
  Work all_reduce(at::Tensor flat, ReduceOp op = ReduceOp::sum) override;
  Work reduce_scatter(at::Tensor flat, ReduceOp op = ReduceOp::sum, at::Tensor into = {}) override;
  Work all_gather(at::Tensor flat) override;
  Work broadcast(at::Tensor flat, int64_t root) override;
  void barrier() override;
  bool adds_in_rank_order() const override { return inner_ != nullptr && inner_->adds_in_rank_order(); }
  at::Tensor allocate(int64_t num_elements, const at::TensorOptions& options) override {
    return inner_ ? inner_->allocate(num_elements, options) : Collective::allocate(num_elements, options);
  }
  std::shared_ptr<Collective> sub_group(const std::vector<int64_t>& ranks) override;
  void abort(const std::string& reason) noexcept override;

 private:
  Work record(Exchange exchange, const at::Tensor& flat, Work inner);

  const std::shared_ptr<Recorder> recorder_;
  const std::shared_ptr<Collective> inner_;  // null: the other ranks are imagined
  const Scope scope_;
  const int64_t rank_, world_size_;
};

}  // namespace fulgur::scaling
