#include "fulgur/base/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fulgur/base/logging.h"

namespace fulgur::trace {
namespace {

struct Event {
  std::string name;
  size_t lane;
  Clock::time_point begin, end;
};

class Recorder {
 public:
  explicit Recorder(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void write_or_warn() {
    try {
      write();
    } catch (const std::exception& error) {
      log_warning("no trace is written to {}: {}", folder_.string(), error.what());
    }
  }

  void add(std::string name, Clock::time_point begin, Clock::time_point end, std::string_view lane) {
    const std::lock_guard lock(mutex_);
    const size_t number = lane.empty() ? lane_of_thread() : lane_named(std::string(lane));
    events_.push_back({std::move(name), number, begin, end});
  }

 private:
  size_t lane_named(const std::string& name) {
    const auto [place, is_new] = lanes_.emplace(name, names_.size());
    if (is_new) names_.push_back(name);
    return place->second;
  }

  size_t lane_of_thread() {
    const auto [place, is_new] = threads_.emplace(std::this_thread::get_id(), threads_.size());
    return lane_named(fmt::format("thread {}", place->second));
  }

  void write() {
    const std::lock_guard lock(mutex_);
    std::filesystem::create_directories(folder_);
    const int64_t rank = log_rank();
    std::ofstream file(folder_ / fmt::format("rank-{}.json", rank));
    file << "[\n";
    for (size_t lane = 0; lane < names_.size(); ++lane) {
      file << fmt::format(R"({{"name": "thread_name", "ph": "M", "pid": {}, "tid": {}, "args": {{"name": "{}"}}}},)",
                          rank, lane, names_[lane])
           << '\n';
    }
    for (const Event& event : events_) {
      file << fmt::format(R"({{"name": "{}", "ph": "X", "pid": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}},)",
                          event.name, rank, event.lane, microseconds(event.begin.time_since_epoch()),
                          microseconds(event.end - event.begin))
           << '\n';
    }
    file << fmt::format(R"({{"name": "process_name", "ph": "M", "pid": {0}, "args": {{"name": "rank {0}"}}}})", rank)
         << "\n]\n";
    if (!file.flush()) throw std::runtime_error("writing failed");
  }

  static double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

  const std::filesystem::path folder_;
  std::mutex mutex_;
  std::vector<Event> events_;
  std::map<std::string, size_t> lanes_;
  std::vector<std::string> names_;  // by lane
  std::map<std::thread::id, size_t> threads_;
};

Recorder* recorder() {
  static const char* const folder = std::getenv("FULGUR_TRACE");
  if (folder == nullptr || *folder == '\0') return nullptr;
  // Never destroyed: threads may add spans until the end of the process, when the file is written.
  static Recorder* const recorder = [] {
    static Recorder* const made = new Recorder(folder);
    std::atexit([] { made->write_or_warn(); });
    return made;
  }();
  return recorder;
}

// The spans that ended last. Names are copied: their owners may be gone when somebody asks.
class RecentSpans {
 public:
  static RecentSpans& instance() {
    static auto* const never_destroyed = new RecentSpans;  // threads may end spans until the process ends
    return *never_destroyed;
  }

  void add(std::string_view name, uint64_t begin, uint64_t end) {
    const std::lock_guard lock(mutex_);
    if (thread_ == 0) thread_ = ++num_threads_;
    Entry& entry = entries_[num_added_++ % entries_.size()];
    entry.num_bytes = std::min(name.size(), entry.name.size());
    std::copy_n(name.data(), entry.num_bytes, entry.name.data());
    entry.thread = thread_;
    entry.begin = begin;
    entry.end = end;
  }

  std::vector<RecentSpan> get() {
    const std::lock_guard lock(mutex_);
    const uint64_t now = internal::ticks();
    const std::chrono::duration<double> passed = Clock::now() - start_;
    const double seconds_per_tick = now > start_ticks_ ? passed.count() / static_cast<double>(now - start_ticks_) : 0;
    const auto seconds = [&](uint64_t begin, uint64_t end) {
      return end > begin ? static_cast<double>(end - begin) * seconds_per_tick : 0.0;
    };
    std::vector<RecentSpan> spans;
    for (uint64_t i = num_added_ - std::min<uint64_t>(num_added_, entries_.size()); i < num_added_; ++i) {
      const Entry& entry = entries_[i % entries_.size()];
      spans.push_back({.name = std::string(entry.name.data(), entry.num_bytes),
                       .thread = entry.thread,
                       .ended_s = seconds(entry.end, now),
                       .seconds = seconds(entry.begin, entry.end)});
    }
    return spans;
  }

 private:
  struct Entry {
    std::array<char, RecentSpan::kMostNameBytes> name;
    size_t num_bytes = 0;
    int64_t thread = 0;
    uint64_t begin = 0, end = 0;  // ticks
  };

  static inline constinit thread_local int64_t thread_ = 0;  // number of the calling thread; 0: none yet

  const Clock::time_point start_ = Clock::now();
  const uint64_t start_ticks_ = internal::ticks();
  std::mutex mutex_;
  std::array<Entry, kMostRecentSpans> entries_{};
  uint64_t num_added_ = 0;
  int64_t num_threads_ = 0;
};

}  // namespace

void internal::remember(std::string_view name, uint64_t begin_ticks) {
  RecentSpans::instance().add(name, begin_ticks, ticks());
}

ScopedRecentSpans::ScopedRecentSpans() {
  RecentSpans::instance();  // starts the clock that its times are measured by
  ++internal::num_recent_scopes;
}

std::vector<RecentSpan> recent_spans() { return RecentSpans::instance().get(); }

void Profile::add(std::string_view name, Clock::duration time) {
  auto sum = sums_.find(name);
  if (sum == sums_.end()) sum = sums_.emplace(name, Sum()).first;
  ++sum->second.calls;
  sum->second.total += time;
}

bool internal::writes_file() {
  static const bool writes = recorder() != nullptr;
  return writes;
}

void add(std::string_view name, Clock::time_point begin, Clock::time_point end, std::string_view lane) {
  if (internal::profile != nullptr && lane.empty()) internal::profile->add(name, end - begin);
  if (Recorder* const to = recorder()) to->add(std::string(name), begin, end, lane);
}

}  // namespace fulgur::trace
