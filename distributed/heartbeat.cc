#include "distributed/heartbeat.h"

#include <fmt/format.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

namespace fulgur {
namespace {

constexpr const char* kFailureKey = "failure";

std::string rank_key(int64_t rank) { return fmt::format("heartbeat/{}", rank); }

// What a rank writes: "<beat> <step> <group>=<number started> ...", beat -1 when it has left.
struct Beat {
  int64_t beat = 0;
  int64_t step = 0;
  std::map<std::string, int64_t> started{};
};

std::string to_text(const Beat& beat) {
  std::string text = fmt::format("{} {}", beat.beat, beat.step);
  for (const auto& [group, number] : beat.started) text += fmt::format(" {}={}", group, number);
  return text;
}

Beat to_beat(const std::string& text) {
  std::istringstream words(text);
  Beat beat;
  words >> beat.beat >> beat.step;
  for (std::string word; words >> word;) {
    const size_t equals = word.rfind('=');
    beat.started[word.substr(0, equals)] = std::stoll(word.substr(equals + 1));
  }
  return beat;
}

std::string to_text(const Diagnosis& diagnosis) {
  return fmt::format("{} {}", diagnosis.failed_rank.value_or(-1), diagnosis.text);
}

Diagnosis to_diagnosis(const std::string& text) {
  const size_t space = text.find(' ');
  const int64_t rank = std::stoll(text.substr(0, space));
  return {rank < 0 ? std::nullopt : std::optional(rank), text.substr(space + 1)};
}

// What the store holds about some ranks at one time.
struct Reading {
  std::map<int64_t, Beat> beats{};
  std::optional<Diagnosis> failure{};
};

std::string list_of(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  return text;
}

// "at step 12, in collective 16 of group 'data', 3 of 'control'": the group in question first.
std::string place_of(const Beat& beat, const std::string& group) {
  const auto found = beat.started.find(group);
  const int64_t number = found == beat.started.end() ? 0 : found->second;
  std::string text = number == 0 ? fmt::format("at step {}, before any collective of group '{}'", beat.step, group)
                                 : fmt::format("at step {}, in collective {} of group '{}'", beat.step, number, group);
  for (const auto& [other, count] : beat.started) {
    if (other != group && count > 0) text += fmt::format(", {} of '{}'", count, other);
  }
  return text;
}

// Compares two readings of the ranks that a collective needs.
Diagnosis compare(const Reading& before, const Reading& after, const std::string& group, int64_t number,
                  const std::vector<int64_t>& ranks) {
  std::vector<int64_t> absent, left, silent, behind;
  for (const int64_t rank : ranks) {
    const auto was = before.beats.find(rank), is = after.beats.find(rank);
    if (is == after.beats.end()) {
      absent.push_back(rank);
    } else if (is->second.beat < 0) {
      left.push_back(rank);
    } else if (was != before.beats.end() && was->second.beat == is->second.beat) {
      silent.push_back(rank);
    } else if (const auto started = is->second.started.find(group);
               started == is->second.started.end() || started->second < number) {
      behind.push_back(rank);
    }
  }
  if (!absent.empty()) return {absent.front(), fmt::format("{} never joined the run", list_of(absent))};
  if (!silent.empty()) {
    return {silent.front(), fmt::format("{} no sign of life (killed, or hanging); last seen {}",
                                        list_of(silent) + (silent.size() == 1 ? " gives" : " give"),
                                        place_of(after.beats.at(silent.front()), group))};
  }
  if (!left.empty()) {
    return {left.front(), fmt::format("{} left the run {}", list_of(left) + (left.size() == 1 ? " has" : " have"),
                                      place_of(after.beats.at(left.front()), group))};
  }
  if (!behind.empty()) {
    return {behind.front(),
            fmt::format("{} missing: alive, but still {}", list_of(behind) + (behind.size() == 1 ? " is" : " are"),
                        place_of(after.beats.at(behind.front()), group))};
  }
  return {std::nullopt, "every rank is alive and has started it; the network between them may have failed"};
}

}  // namespace

// The thread runs `jobs` against the store between beats; it alone uses the store.
struct Heartbeat::Shared {
  const c10::intrusive_ptr<c10d::Store> store;
  const int64_t rank;
  const std::optional<int64_t> store_rank;
  const std::chrono::milliseconds interval;
  std::atomic<int64_t> step{0};

  std::mutex mutex{};
  std::condition_variable changed{};
  std::map<std::string, std::atomic<int64_t>> started{};
  std::vector<std::function<void()>> jobs{};
  bool stop = false;
  std::promise<void> ended{};

  Beat beat_now(int64_t number) {
    const std::lock_guard lock(mutex);
    Beat beat{.beat = number, .step = step};
    for (const auto& [group, count] : started) beat.started[group] = count;
    return beat;
  }

  void write(int64_t number) { store->set(rank_key(rank), to_text(beat_now(number))); }

  std::vector<std::function<void()>> wait_for_jobs() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, interval, [&] { return stop || !jobs.empty(); });
    return std::exchange(jobs, {});
  }

  void run() {
    try {
      for (int64_t number = 1; !is_stopped(); ++number) {
        write(number);
        for (const auto& job : wait_for_jobs()) job();
      }
      write(-1);
    } catch (const std::exception&) {  // the store has gone: jobs that nobody runs tell so
      const std::lock_guard lock(mutex);
      jobs.clear();
      stop = true;
    }
    ended.set_value();
  }

  bool is_stopped() {
    const std::lock_guard lock(mutex);
    return stop && jobs.empty();
  }

  // Runs `job` on the thread; empty if the store has gone or does not answer in time.
  template <class Result>
  std::optional<Result> ask(std::function<Result()> job) {
    auto promise = std::make_shared<std::promise<Result>>();
    std::future<Result> result = promise->get_future();
    {
      const std::lock_guard lock(mutex);
      if (stop) return std::nullopt;
      jobs.push_back([promise = std::move(promise), job = std::move(job)] { promise->set_value(job()); });
    }
    changed.notify_all();
    if (result.wait_for(2 * interval + std::chrono::seconds(1)) != std::future_status::ready) return std::nullopt;
    try {
      return result.get();
    } catch (const std::future_error&) {
      return std::nullopt;
    }
  }

  Reading read(const std::vector<int64_t>& ranks) {
    Reading reading;
    if (store->check({kFailureKey})) reading.failure = to_diagnosis(store->get_to_str(kFailureKey));
    for (const int64_t other : ranks) {
      if (store->check({rank_key(other)})) reading.beats[other] = to_beat(store->get_to_str(rank_key(other)));
    }
    return reading;
  }

  // The record that stands in the end: this one, or the one that was there.
  Diagnosis record(const Diagnosis& diagnosis) {
    return to_diagnosis(store->compareSet(kFailureKey, std::string(), to_text(diagnosis)));
  }
};

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, int64_t rank, std::optional<int64_t> store_rank,
                     std::chrono::milliseconds interval)
    : shared_(new Shared{.store = std::move(store), .rank = rank, .store_rank = store_rank, .interval = interval}) {
  shared_->write(0);
  std::thread([shared = shared_] { shared->run(); }).detach();
}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->changed.notify_all();
  shared_->ended.get_future().wait_for(2 * shared_->interval + std::chrono::seconds(1));
}

void Heartbeat::set_step(int64_t global_step) { shared_->step = global_step; }

std::atomic<int64_t>& Heartbeat::num_started(const std::string& group) {
  const std::lock_guard lock(shared_->mutex);
  return shared_->started[group];
}

void Heartbeat::report_failure(const std::string& message) {
  const auto shared = shared_;
  const Diagnosis mine{shared->rank,
                       fmt::format("rank {} failed at step {}: {}", shared->rank, shared->step.load(), message)};
  shared->ask<Diagnosis>([shared, mine] { return shared->record(mine); });
}

Diagnosis Heartbeat::diagnose(const std::string& group, int64_t number, const std::vector<int64_t>& ranks) {
  const auto shared = shared_;
  std::optional<Reading> first, last;
  for (int i = 0; i < 3; ++i) {  // beats that do not change over two intervals have stopped
    if (i > 0) std::this_thread::sleep_for(shared->interval);
    last = shared->ask<Reading>([shared, ranks] { return shared->read(ranks); });
    if (!last) break;
    if (last->failure) return *last->failure;
    if (!first) first = last;
  }
  std::optional<Diagnosis> diagnosis;
  if (last) {
    const Diagnosis mine = compare(*first, *last, group, number, ranks);
    diagnosis = shared->ask<Diagnosis>([shared, mine] { return shared->record(mine); });
    if (shared->rank == shared->store_rank) std::this_thread::sleep_for(2 * shared->interval);  // the others read it
  }
  if (diagnosis) return *diagnosis;
  if (!shared->store_rank) return {std::nullopt, "the store that the launcher keeps does not answer"};
  return {shared->store_rank, fmt::format("rank {}, which keeps the store, does not answer (killed, ended, or hanging)",
                                          *shared->store_rank)};
}

}  // namespace fulgur
