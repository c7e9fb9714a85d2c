#include "tools/scaling/recorder.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

namespace fulgur::scaling {
namespace {

using namespace std::chrono_literals;

// Whether all threads of this process sleep, except the calling one. A thread that was woken counts as running at once,
// also where no core is free for it.
bool others_sleep() {
  const std::string own = std::to_string(::gettid());
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    if (thread.path().filename() == own) continue;
    std::ifstream file(thread.path() / "stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const size_t end_of_name = text.rfind(')');
    if (end_of_name == std::string::npos) continue;  // the thread has ended
    if (text[end_of_name + 2] == 'R') return false;
  }
  return true;
}

}  // namespace

// Background threads are served in the order in which they come.
void Recorder::await_quiet(std::unique_lock<std::mutex>& lock) {
  const int64_t ticket = next_ticket_++;
  served_.wait(lock, [&] { return serving_ == ticket; });
  lock.unlock();
  const auto serve_next = c10::make_scope_exit([&] {
    lock.lock();
    ++serving_;
    served_.notify_all();
  });
  const auto limit = std::chrono::steady_clock::now() + 60s;
  for (int quiet = 0; quiet < 2; quiet = others_sleep() ? quiet + 1 : 0) {
    std::this_thread::sleep_for(200us);
    TORCH_CHECK(std::chrono::steady_clock::now() < limit,
                "other threads of the process have not slept for a minute, so that the order of events is not known; "
                "record a step in a process that does nothing else");
  }
}

int64_t Recorder::add(Event event) {
  std::unique_lock lock(mutex_);
  const auto self = std::this_thread::get_id();
  const auto place = std::ranges::find(threads_, self);
  event.lane = place - threads_.begin();
  if (place == threads_.end()) threads_.push_back(self);
  if (lazily_ && event.lane > 0) await_quiet(lock);
  if (event.kind == Event::Kind::launch) event.id = num_ids_++;
  events_.push_back(event);
  return event.id;
}

std::vector<Event> Recorder::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

Work RecordingCollective::record(Exchange exchange, const at::Tensor& flat, Work inner) {
  const int64_t id = recorder_->add({.kind = Event::Kind::launch,
                                     .exchange = exchange,
                                     .scope = scope_,
                                     .num_bytes = static_cast<int64_t>(flat.nbytes())});
  const auto there = std::make_shared<Work>(std::move(inner));
  return Work([recorder = recorder_, scope = scope_, there, id] {
    there->wait();
    recorder->add({.kind = Event::Kind::wait, .id = id, .scope = scope});
  });
}

Work RecordingCollective::all_reduce(at::Tensor flat, ReduceOp op) {
  check_flat(flat);
  if (inner_) return record(Exchange::all_reduce, flat, inner_->all_reduce(flat, op));
  if (op == ReduceOp::sum) flat.mul_(world_size_);
  return record(Exchange::all_reduce, flat, Work());
}

Work RecordingCollective::reduce_scatter(at::Tensor flat, ReduceOp op, at::Tensor into) {
  check_flat(flat);
  if (inner_) return record(Exchange::reduce_scatter, flat, inner_->reduce_scatter(flat, op, into));
  const at::Tensor range = rank_range(flat.numel(), rank_, world_size_).of(flat);
  if (op == ReduceOp::sum) range.mul_(world_size_);
  if (into.defined()) {
    check_into(into, range);
    into.copy_(range);
  }
  return record(Exchange::reduce_scatter, flat, Work());
}

// The ranges of imagined ranks become this rank's, as far as they have as many elements.
Work RecordingCollective::all_gather(at::Tensor flat) {
  check_flat(flat);
  if (inner_) return record(Exchange::all_gather, flat, inner_->all_gather(flat));
  const at::Tensor own = rank_range(flat.numel(), rank_, world_size_).of(flat);
  for (int64_t r = 0; r < world_size_; ++r) {
    const ElementRange range = rank_range(flat.numel(), r, world_size_);
    const int64_t common = std::min(range.size(), own.numel());
    if (r != rank_ && common > 0) flat.narrow(0, range.begin, common).copy_(own.narrow(0, 0, common));
  }
  return record(Exchange::all_gather, flat, Work());
}

Work RecordingCollective::broadcast(at::Tensor flat, int64_t root) {
  check_flat(flat);
  check_root(root, world_size_);
  return record(Exchange::broadcast, flat, inner_ ? inner_->broadcast(flat, root) : Work());
}

void RecordingCollective::barrier() {
  if (inner_) inner_->barrier();
}

std::shared_ptr<Collective> RecordingCollective::sub_group(const std::vector<int64_t>& ranks) {
  check_ranks(ranks, world_size_);
  const Scope scope = ranks.size() > 1 && ranks[1] - ranks[0] == 1 ? Scope::within : Scope::across;
  if (inner_) {
    auto group = inner_->sub_group(ranks);
    return group ? std::make_shared<RecordingCollective>(recorder_, scope, std::move(group)) : nullptr;
  }
  const auto own = std::ranges::find(ranks, rank_);
  if (own == ranks.end()) return nullptr;
  return std::make_shared<RecordingCollective>(recorder_, scope, own - ranks.begin(),
                                               static_cast<int64_t>(ranks.size()));
}

void RecordingCollective::abort(const std::string& reason) noexcept {
  if (inner_) inner_->abort(reason);
}

}  // namespace fulgur::scaling
