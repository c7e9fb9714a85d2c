#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fulgur::trace {

// Where the time of a step goes. With FULGUR_TRACE=<folder> in the environment each process writes
// <folder>/rank-<rank>.json when it ends, for chrome://tracing or ui.perfetto.dev; the clocks of processes on one
// machine agree. A Profile sums the spans of its thread, and an Observer is told of each. While a ScopedRecentSpans
// lives, the process remembers the spans that ended last. If none of these is in use, a span only tests four flags.
using Clock = std::chrono::steady_clock;

// The sums of a thread's spans by name.
class Profile {
 public:
  // The spans of one name: how often they ended, and how long they took in all.
  struct Sum {
    int64_t calls = 0;
    Clock::duration total{};
  };
  void add(std::string_view name, Clock::duration time);

  // Lets a std::string_view look a name up without a copy.
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>()(name); }
  };
  using Sums = std::unordered_map<std::string, Sum, Hash, std::equal_to<>>;
  const Sums& sums() const { return sums_; }

 private:
  Sums sums_;
};

// Gets the begin and the end of every span of its thread. The span that began last ends first.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin(std::string_view name) = 0;
  virtual void end() = 0;  // not called for a span that ends when the thread has another observer, or none
};

namespace internal {
inline constinit thread_local Profile* profile = nullptr;    // null: this thread has none
inline constinit thread_local Observer* observer = nullptr;  // null: this thread has none
bool writes_file();

inline constinit std::atomic<int> num_recent_scopes = 0;  // ScopedRecentSpans that live

// A time stamp that is read in a few nanoseconds if the processor has a counter.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}
void remember(std::string_view name, uint64_t begin_ticks);  // a span of the calling thread that ends now
}  // namespace internal

// Makes `profile` that of the calling thread for the lifetime of the object.
class ScopedProfile {
 public:
  explicit ScopedProfile(Profile& profile) : before_(internal::profile) { internal::profile = &profile; }
  ~ScopedProfile() { internal::profile = before_; }
  ScopedProfile(const ScopedProfile&) = delete;
  ScopedProfile& operator=(const ScopedProfile&) = delete;

 private:
  Profile* before_;
};

inline void set_observer(Observer* observer) { internal::observer = observer; }  // borrowed; of the calling thread

// Whether anything records the spans of the calling thread.
inline bool enabled() {
  return internal::profile != nullptr || internal::observer != nullptr || internal::writes_file();
}

// Adds a span to the lane called `lane`, or, if empty, to the lane of the calling thread, and to the thread's profile.
void add(std::string_view name, Clock::time_point begin, Clock::time_point end, std::string_view lane = {});

// A span that has ended.
struct RecentSpan {
  std::string name{};  // at most kMostNameBytes
  int64_t thread = 0;  // numbers the threads of the process, in the order of their first spans
  double ended_s = 0;  // seconds from its end until now
  double seconds = 0;  // how long it took
  static constexpr size_t kMostNameBytes = 48;
};

// Lets the process remember the spans that end during the lifetime of the object; those of single callbacks only if
// somebody else looks at spans, too. Threading: any thread.
class ScopedRecentSpans {
 public:
  ScopedRecentSpans();
  ~ScopedRecentSpans() { --internal::num_recent_scopes; }
  ScopedRecentSpans(const ScopedRecentSpans&) = delete;
  ScopedRecentSpans& operator=(const ScopedRecentSpans&) = delete;
};

// The spans of all threads that ended last, at most kMostRecentSpans of them, the oldest first.
std::vector<RecentSpan> recent_spans();
inline constexpr size_t kMostRecentSpans = 100;

// Records the time from its construction to the end of the block. The name is borrowed.
class Span {
 public:
  explicit Span(std::string_view name)
      : name_(name),
        begin_(enabled() ? Clock::now() : Clock::time_point()),
        observer_(internal::observer),
        begin_ticks_(is_remembered() ? internal::ticks() : 0) {
    if (observer_ != nullptr) observer_->begin(name_);
  }
  ~Span() {
    if (observer_ != nullptr && observer_ == internal::observer) observer_->end();
    if (begin_ != Clock::time_point()) add(name_, begin_, Clock::now());
    if (begin_ticks_ != 0) internal::remember(name_, begin_ticks_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  bool is_remembered() const {
    return internal::num_recent_scopes.load(std::memory_order_relaxed) > 0 && !name_.empty();
  }

  std::string_view name_;
  Clock::time_point begin_;
  Observer* observer_;    // null: the thread had none when the span began
  uint64_t begin_ticks_;  // 0: the span is not remembered
};

}  // namespace fulgur::trace
