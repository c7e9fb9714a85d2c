#include "fulgur/distributed/heartbeat.h"

#include <fmt/format.h>

#include <algorithm>
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
constexpr const char* kDiagnosingKey = "diagnosing";  // how many ranks have asked for the cause of a failure
constexpr const char* kNone = "none";
constexpr std::chrono::milliseconds kSilence{800};  // at least two intervals

// How long a call waits for an answer of the store, in addition to two intervals: a busy host must not count as lost.
constexpr std::chrono::milliseconds kPatience{2500};

std::string rank_key(int64_t rank) { return fmt::format("heartbeat/{}", rank); }

// The last collective that a rank has started in a group.
struct Call {
  int64_t number = 0;
  std::string name{};
};

// The text that a rank writes: "<beat> <step> <at end> <group>=<number started>:<name of the last> ..."; after the rank
// has left, the beat is -1.
struct Beat {
  int64_t beat = 0;
  int64_t step = 0;
  bool at_end = false;
  std::map<std::string, Call> started{};

  Call last_in(const std::string& group) const {
    const auto found = started.find(group);
    return found == started.end() ? Call() : found->second;
  }
};

std::string to_text(const Beat& beat) {
  std::string text = fmt::format("{} {} {:d}", beat.beat, beat.step, beat.at_end);
  for (const auto& [group, call] : beat.started) text += fmt::format(" {}={}:{}", group, call.number, call.name);
  return text;
}

Beat to_beat(const std::string& text) {
  std::istringstream words(text);
  Beat beat;
  words >> beat.beat >> beat.step >> beat.at_end;
  for (std::string word; words >> word;) {
    const size_t equals = word.rfind('='), colon = word.rfind(':');
    beat.started[word.substr(0, equals)] = {std::stoll(word.substr(equals + 1)), word.substr(colon + 1)};
  }
  return beat;
}

std::string to_text(const Diagnosis& diagnosis) {
  return fmt::format("{} {:d} {}", diagnosis.failed_rank.value_or(-1), diagnosis.is_ending, diagnosis.text);
}

Diagnosis to_diagnosis(const std::string& text) {
  std::istringstream words(text);
  int64_t rank = 0;
  Diagnosis diagnosis;
  words >> rank >> diagnosis.is_ending;
  if (rank >= 0) diagnosis.failed_rank = rank;
  diagnosis.text = text.substr(static_cast<size_t>(words.tellg()) + 1);
  return diagnosis;
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

// "at step 12, in collective 16 of group 'data' (all_reduce), 3 of 'control' (barrier)": the group in question first.
std::string place_of(const Beat& beat, const std::string& group) {
  if (beat.at_end) return "at the end of the program";
  const auto [number, name] = beat.last_in(group);
  std::string text = fmt::format("at step {}, ", beat.step);
  if (number > 0) {
    text += fmt::format("in collective {} of group '{}' ({})", number, group, name);
  } else if (name == GroupProgress::kConnecting) {
    text += fmt::format("connecting group '{}'", group);
  } else {
    text += fmt::format("before {} group '{}'", name.empty() ? "connecting" : "any collective of", group);
  }
  for (const auto& [other, call] : beat.started) {
    if (other != group && call.number > 0) text += fmt::format(", {} of '{}' ({})", call.number, other, call.name);
  }
  return text;
}

Diagnosis disagreement(const Reading& reading, const std::string& group, int64_t one, int64_t other) {
  return {std::nullopt,
          fmt::format("rank {} is {}, but rank {} is {}: is there a call that not every rank makes, such as fit() or "
                      "save_checkpoint()?",
                      one, place_of(reading.beats.at(one), group), other, place_of(reading.beats.at(other), group))};
}

// Reports two ranks that have started different collectives; nullopt if all have started the same one.
std::optional<Diagnosis> difference(const Reading& reading, const std::string& group,
                                    const std::vector<int64_t>& ranks) {
  const Beat& first = reading.beats.at(ranks.front());
  for (const int64_t rank : ranks) {
    const Beat& other = reading.beats.at(rank);
    const Call ours = first.last_in(group), theirs = other.last_in(group);
    if (ours.number == theirs.number && ours.name == theirs.name && first.at_end == other.at_end) continue;
    return disagreement(reading, group, ranks.front(), rank);
  }
  return std::nullopt;
}

// Whether a rank has started a collective that the other has not.
bool is_ahead(const Beat& beat, const Beat& other) {
  return std::ranges::any_of(
      beat.started, [&](const auto& entry) { return entry.second.number > other.last_in(entry.first).number; });
}

bool is_silent(const Reading& before, const Reading& after, int64_t rank) {
  const auto was = before.beats.find(rank), is = after.beats.find(rank);
  return was != before.beats.end() && is != after.beats.end() && is->second.beat >= 0 &&
         was->second.beat == is->second.beat;
}

bool any_silent(const Reading& before, const Reading& after, const std::vector<int64_t>& ranks) {
  return std::ranges::any_of(ranks, [&](int64_t rank) { return is_silent(before, after, rank); });
}

// Compares two readings of the ranks that a collective needs.
Diagnosis compare(const Reading& before, const Reading& after, const std::string& group, int64_t number,
                  const std::vector<int64_t>& ranks) {
  std::vector<int64_t> absent, left, silent, behind;
  for (const int64_t rank : ranks) {
    const auto is = after.beats.find(rank);
    if (is == after.beats.end()) {
      absent.push_back(rank);
    } else if (is->second.beat < 0) {
      left.push_back(rank);
    } else if (is_silent(before, after, rank)) {
      silent.push_back(rank);
    } else if (is->second.last_in(group).number < number) {
      behind.push_back(rank);
    }
  }
  if (!absent.empty())
    return {absent.front(), fmt::format("{} no sign of life since the ranks met (killed, or hanging)",
                                        list_of(absent) + (absent.size() == 1 ? " gives" : " give"))};
  if (!silent.empty()) {
    return {silent.front(), fmt::format("{} no sign of life (killed, or hanging); last seen {}",
                                        list_of(silent) + (silent.size() == 1 ? " gives" : " give"),
                                        place_of(after.beats.at(silent.front()), group))};
  }
  if (!left.empty()) {
    return {left.front(), fmt::format("{} left the run {}", list_of(left) + (left.size() == 1 ? " has" : " have"),
                                      place_of(after.beats.at(left.front()), group))};
  }
  for (const int64_t rank : behind) {
    const auto waits = std::ranges::find_if(
        ranks, [&](int64_t other) { return after.beats.at(other).last_in(group).number >= number; });
    if (waits != ranks.end() && is_ahead(after.beats.at(rank), after.beats.at(*waits)))
      return disagreement(after, group, *waits, rank);
  }
  if (!behind.empty()) {
    return {behind.front(),
            fmt::format("{} missing: alive, but still {}", list_of(behind) + (behind.size() == 1 ? " is" : " are"),
                        place_of(after.beats.at(behind.front()), group))};
  }
  if (const auto found = difference(after, group, ranks)) return *found;
  return {std::nullopt, "every rank is alive and has started it; the network between them may have failed"};
}

// Measures how long a number has not changed. Time in which this process itself did not run (Ctrl-Z, a busy machine)
// does not count.
class Silence {
 public:
  using Clock = std::chrono::steady_clock;

  Silence(std::chrono::milliseconds interval, std::chrono::milliseconds timeout)
      : interval_(interval), timeout_(timeout) {}

  // Call it once per interval. Returns whether the number has not changed for the timeout.
  bool is_too_long(int64_t number) {
    const auto now = Clock::now();
    silent_ = number == number_ ? silent_ + std::min<Clock::duration>(now - looked_, 2 * interval_) : Clock::duration();
    number_ = number;
    looked_ = now;
    return silent_ > timeout_;
  }

 private:
  const std::chrono::milliseconds interval_, timeout_;
  Clock::time_point looked_ = Clock::now();
  Clock::duration silent_{};
  int64_t number_ = -1;  // none yet
};

}  // namespace

// State shared with the heartbeat thread, which runs `jobs` against the store between beats; it alone uses the store.
struct Heartbeat::Shared {
  const c10::intrusive_ptr<c10d::Store> store;
  const int64_t rank;
  const std::optional<int64_t> store_rank;
  const std::chrono::milliseconds interval, timeout;
  std::atomic<int64_t> step{0};
  std::atomic<bool> at_end{false};
  std::atomic<int64_t> num_beats{0};

  std::mutex mutex{};
  std::condition_variable changed{};
  std::map<std::string, GroupProgress> started{};
  std::vector<std::function<void()>> jobs{};
  bool stop = false;
  bool answers = true;  // false if the store did not answer the last request
  std::promise<void> ended{};
  std::optional<int64_t> watched{};    // the rank whose heartbeat this rank checks
  Silence silence{interval, timeout};  // how long the watched rank has been silent
  std::function<void()> on_failure{};
  std::map<int64_t, Beat> seen{};  // the other ranks when a failure was diagnosed

  Beat beat_now(int64_t number) {
    const std::lock_guard lock(mutex);
    Beat beat{.beat = number, .step = step, .at_end = at_end};
    for (const auto& [group, progress] : started) beat.started[group] = {progress.number, progress.name.load()};
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
        look();
        num_beats = number;
        for (const auto& job : wait_for_jobs()) job();
        const std::lock_guard lock(mutex);
        answers = true;
      }
      write(-1);
    } catch (const std::exception&) {  // the store has gone: dropping the jobs makes their callers return
      {
        const std::lock_guard lock(mutex);
        jobs.clear();
        stop = true;
      }
      changed.notify_all();
      ended.set_value();
      if (!may_finish_without_store()) tell_of_failure();
      return;
    }
    ended.set_value();
  }

  // The rank that keeps the store may end while this one still returns from the last barrier, so at the end the loss of
  // the store counts as a failure only after the timeout. Returns whether this rank has stopped watching by then.
  bool may_finish_without_store() {
    std::unique_lock lock(mutex);
    return at_end && changed.wait_for(lock, timeout, [&] { return !on_failure; });
  }

  // Looks for a record of failure, and checks the heartbeat of the watched rank.
  void look() {
    {
      const std::lock_guard lock(mutex);
      if (!watched || !on_failure) return;
    }
    const std::string key = rank_key(*watched);
    if (find_record()) return tell_of_failure();
    const Beat beat = to_beat(store->get_to_str(key));
    if (beat.beat < 0 || !silence.is_too_long(beat.beat)) return;
    record({*watched, fmt::format("rank {} gives no sign of life (its host has gone, or it hangs); last seen {}",
                                  *watched, place_of(beat, "data"))});
    tell_of_failure();
  }

  // Calls on_failure at most once, and not after stop_watching(). Uses another thread, because aborting NCCL may take
  // long and other threads wait for the answers of this one.
  void tell_of_failure() {
    std::function<void()> tell;
    {
      const std::lock_guard lock(mutex);
      tell = std::exchange(on_failure, nullptr);
    }
    if (tell) std::thread(std::move(tell)).detach();
  }

  // A call to a store whose host has gone does not return, so a separate thread checks that run() makes progress.
  void look_at_store() {
    Silence of_store(interval, timeout);
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, interval, [&] { return stop || !on_failure; })) {
      if (!of_store.is_too_long(num_beats)) continue;
      answers = false;
      lock.unlock();
      return tell_of_failure();
    }
  }

  bool is_stopped() {
    const std::lock_guard lock(mutex);
    return stop && jobs.empty();
  }

  // Runs `job` on the heartbeat thread; nullopt if the store has gone or does not answer in time.
  template <class Result>
  std::optional<Result> ask(std::function<Result()> job) {
    auto promise = std::make_shared<std::promise<Result>>();
    std::future<Result> result = promise->get_future();
    {
      const std::lock_guard lock(mutex);
      if (stop || !answers) return std::nullopt;
      jobs.push_back([promise = std::move(promise), job = std::move(job)] { promise->set_value(job()); });
    }
    changed.notify_all();
    if (result.wait_for(2 * interval + kPatience) != std::future_status::ready) {
      const std::lock_guard lock(mutex);
      answers = false;
      return std::nullopt;
    }
    try {
      return result.get();
    } catch (const std::future_error&) {
      return std::nullopt;
    }
  }

  // The record of failure, in one request.
  std::optional<Diagnosis> find_record() {
    const std::string record = store->compareSet(kFailureKey, std::string(kNone), std::string(kNone));
    return record == kNone ? std::nullopt : std::optional(to_diagnosis(record));
  }

  // Three requests for any number of ranks, if each of them has written once.
  Reading read(const std::vector<int64_t>& ranks) {
    Reading reading{.failure = find_record()};
    std::vector<int64_t> there = ranks;
    std::vector<std::string> keys;
    for (const int64_t other : ranks) keys.push_back(rank_key(other));
    if (!store->check(keys)) {
      std::erase_if(there, [&](int64_t other) { return !store->check({rank_key(other)}); });
      keys.clear();
      for (const int64_t other : there) keys.push_back(rank_key(other));
    }
    const auto texts = keys.empty() ? std::vector<std::vector<uint8_t>>() : store->multiGet(keys);
    for (size_t i = 0; i < there.size(); ++i) {
      reading.beats[there[i]] = to_beat(std::string(texts[i].begin(), texts[i].end()));
    }
    return reading;
  }

  // Writes the record unless there is one already; returns the record that is in the store afterwards.
  Diagnosis record(const Diagnosis& diagnosis) {
    return to_diagnosis(store->compareSet(kFailureKey, std::string(), to_text(diagnosis)));
  }
};

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, int64_t rank, std::optional<int64_t> store_rank,
                     std::chrono::milliseconds interval, std::chrono::milliseconds timeout)
    : shared_(new Shared{
          .store = std::move(store), .rank = rank, .store_rank = store_rank, .interval = interval, .timeout = timeout}),
      ended_(shared_->ended.get_future()) {
  shared_->write(0);
  std::thread([shared = shared_] { shared->run(); }).detach();
}

Heartbeat::~Heartbeat() { stop(); }

void Heartbeat::stop() {
  stop_watching();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
    if (!shared_->answers) return;
  }
  shared_->changed.notify_all();
  ended_.wait_for(2 * shared_->interval + kPatience);
}

void Heartbeat::set_step(int64_t global_step) { shared_->step = global_step; }

void Heartbeat::set_at_end() { shared_->at_end = true; }

void Heartbeat::stop_watching() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->on_failure = nullptr;
  }
  shared_->changed.notify_all();
}

void Heartbeat::watch(int64_t num_ranks, std::function<void()> on_failure) {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->watched = (shared_->rank + 1) % num_ranks;
    shared_->on_failure = std::move(on_failure);
  }
  std::thread([shared = shared_] { shared->look_at_store(); }).detach();
}

GroupProgress& Heartbeat::progress(const std::string& group) {
  const std::lock_guard lock(shared_->mutex);
  return shared_->started[group];
}

void Heartbeat::report_failure(const std::string& message) {
  const auto shared = shared_;
  const Diagnosis mine{.failed_rank = shared->rank,
                       .text = fmt::format("rank {} failed at step {}: {}", shared->rank, shared->step.load(), message),
                       .is_ending = true};
  shared->ask<Diagnosis>([shared, mine] { return shared->record(mine); });
}

// The first rank that asks looks for the cause; the others read what it has found, or look themselves if it takes too
// long: if all looked, the store would get requests for N^2 heartbeats.
Diagnosis Heartbeat::diagnose(const std::string& group, int64_t number, const std::vector<int64_t>& ranks) {
  const auto shared = shared_;
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto others_are_asking = shared->ask<bool>([shared] { return shared->store->add(kDiagnosingKey, 1) > 1; });
  const auto end_of_patience = now() + kSilence + 3 * shared->interval;
  while (others_are_asking.value_or(false) && now() < end_of_patience) {
    const auto record = shared->ask<std::optional<Diagnosis>>([shared] { return shared->find_record(); });
    if (!record) break;
    if (*record) return **record;
    std::this_thread::sleep_for(3 * shared->interval);
  }
  std::optional<Reading> first, last;
  const auto end = now() + kSilence;
  for (int i = 0; i < 3 || (any_silent(*first, *last, ranks) && now() < end); ++i) {
    if (i > 0) std::this_thread::sleep_for(shared->interval);
    last = shared->ask<Reading>([shared, ranks] { return shared->read(ranks); });
    if (!last) break;
    {
      const std::lock_guard lock(shared->mutex);
      shared->seen = last->beats;
    }
    if (last->failure) return *last->failure;
    if (!first) first = last;
  }
  std::optional<Diagnosis> diagnosis;
  if (last) {
    const Diagnosis mine = compare(*first, *last, group, number, ranks);
    diagnosis = shared->ask<Diagnosis>([shared, mine] { return shared->record(mine); });
  }
  if (diagnosis) return *diagnosis;
  if (!shared->store_rank) return {std::nullopt, "the store that the launcher keeps does not answer"};
  return {shared->store_rank, fmt::format("rank {}, which keeps the store, does not answer (killed, ended, or hanging)",
                                          *shared->store_rank)};
}

std::vector<std::string> Heartbeat::places() {
  std::map<int64_t, Beat> beats;
  {
    const std::lock_guard lock(shared_->mutex);
    beats = shared_->seen;
  }
  beats[shared_->rank] = shared_->beat_now(0);
  std::vector<std::string> lines;
  for (const auto& [rank, beat] : beats) {
    lines.push_back(fmt::format("rank {} {} {}", rank,
                                beat.beat < 0           ? "has left"
                                : rank == shared_->rank ? "is"
                                                        : "was seen",
                                place_of(beat, "data")));
  }
  return lines;
}

void Heartbeat::leave(const std::vector<int64_t>& ranks) {
  const auto shared = shared_;
  const auto is_there = [&](const Reading& reading, int64_t rank) {
    const auto beat = reading.beats.find(rank);
    return rank != shared->rank && beat != reading.beats.end() && beat->second.beat >= 0;
  };
  const auto end = std::chrono::steady_clock::now() + 2 * shared->interval;
  while (shared->rank == shared->store_rank && std::chrono::steady_clock::now() < end) {
    const auto reading = shared->ask<Reading>([shared, ranks] { return shared->read(ranks); });
    if (!reading || std::ranges::none_of(ranks, [&](int64_t rank) { return is_there(*reading, rank); })) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stop();
}

void Heartbeat::wait_for_others(const std::vector<int64_t>& ranks) {
  const auto shared = shared_;
  if (shared->rank != shared->store_rank) return;
  std::vector<Reading> readings;
  // A beat that has not changed over two intervals has stopped.
  const auto is_there = [&](int64_t rank) {
    const auto& last = readings.back().beats;
    if (rank == shared->rank || !last.contains(rank) || last.at(rank).beat < 0) return false;
    if (readings.size() < 3) return true;
    const auto& before = readings[readings.size() - 3].beats;
    return !before.contains(rank) || before.at(rank).beat != last.at(rank).beat;
  };
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < end) {
    auto reading = shared->ask<Reading>([shared, ranks] { return shared->read(ranks); });
    if (!reading) return;
    readings.push_back(std::move(*reading));
    if (std::ranges::none_of(ranks, is_there)) return;
    std::this_thread::sleep_for(shared->interval);
  }
}

}  // namespace fulgur
