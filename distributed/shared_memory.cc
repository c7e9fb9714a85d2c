#include "fulgur/distributed/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "fulgur/base/logging.h"

namespace fulgur {
namespace {

using std::chrono::milliseconds;

constexpr size_t kCacheLine = 64;
constexpr milliseconds kLookAround{20};  // how often a sleeping rank checks that the others are alive

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// std::atomic's wait and notify do not reach other processes.
long futex(uint32_t& word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

uint32_t load(uint32_t& word) { return std::atomic_ref(word).load(); }

void set_and_wake(uint32_t& word, uint32_t value) {
  std::atomic_ref(word).store(value);
  futex(word, FUTEX_WAKE, INT32_MAX, nullptr);
}

// Returns true if the thread was woken or the word has changed, false after `at_most`.
bool sleep_while(uint32_t& word, uint32_t value, milliseconds at_most) {
  const timespec timeout{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(at_most).count()};
  return futex(word, FUTEX_WAIT, value, &timeout) == 0 || errno == EAGAIN;
}

// Correct across the wrap-around of a counter.
bool is_at_least(uint32_t counter, uint32_t least) { return static_cast<int32_t>(counter - least) >= 0; }

std::string_view first_word(std::string_view text) { return text.substr(0, text.find(' ')); }

// Warns once per process, for all groups.
void warn_of_network() {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  log_warning(
      "the ranks are on one host, but exchange over the network, which is slower: they are in several namespaces of "
      "processes or networks, or may not look at each other (pidfd_open, /proc/PID/fd), so that they cannot share "
      "memory; "
      "set FULGUR_SHARED_MEMORY=0 if that is wanted");
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  const int value_;
};

// Counters begin shortly before their wrap-around, so that every run exercises it.
constexpr uint32_t kFirstRound = 0U - 8U * SharedMemory::kOutboxes;

}  // namespace

// The network namespace is included, because tests of several hosts may run in several network namespaces of one host.
std::optional<std::string> host_identity(const TransportOptions& options) {
  std::string identity;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> identity)) return std::nullopt;
  if (!options.host_id.empty()) identity += "/" + options.host_id;
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    std::array<char, 64> link{};
    if (::readlink(name, link.data(), link.size() - 1) <= 0) return std::nullopt;
    identity += fmt::format(" {}", link.data());
  }
  return identity;
}

// Lies at the beginning of the shared memory.
struct alignas(kCacheLine) SharedMemory::Header {
  uint32_t aborted;
};

struct SharedMemory::Channel::Counters {
  alignas(kCacheLine) uint32_t sent;
  alignas(kCacheLine) uint32_t done;
};

struct alignas(kCacheLine) SharedMemory::Channel::Outbox {
  std::array<char, 24> call;
  int64_t num_bytes;
  std::byte* content() { return reinterpret_cast<std::byte*>(this + 1); }
};

size_t SharedMemory::Channel::num_bytes(int64_t world_size, ChannelOptions options) {
  const size_t outboxes = kOutboxes * (sizeof(Outbox) + static_cast<size_t>(options.outbox_bytes));
  return static_cast<size_t>(world_size) * (sizeof(Counters) + outboxes);
}

SharedMemory::Channel::Channel(SharedMemory& shared, std::byte* memory, ChannelOptions options)
    : shared_(shared),
      memory_(memory),
      options_(options),
      num_sent_(kFirstRound),
      num_done_(kFirstRound),
      spun_for_(kFirstRound - 1) {
  counters(shared_.rank()) = {.sent = kFirstRound, .done = kFirstRound};
}

SharedMemory::Channel::Counters& SharedMemory::Channel::counters(int64_t rank) const {
  return reinterpret_cast<Counters*>(memory_)[rank];
}

SharedMemory::Channel::Outbox& SharedMemory::Channel::outbox(int64_t rank, uint32_t round) const {
  const auto world_size = static_cast<size_t>(shared_.world_size());
  const size_t index = static_cast<size_t>(rank) * kOutboxes + round % kOutboxes;
  return *reinterpret_cast<Outbox*>(memory_ + world_size * sizeof(Counters) +
                                    index * (sizeof(Outbox) + static_cast<size_t>(options_.outbox_bytes)));
}

uint32_t SharedMemory::Channel::rounds_to_be_done() const { return num_sent_ + 1 - static_cast<uint32_t>(kOutboxes); }

bool SharedMemory::Channel::opens_at_once() const {
  for (int64_t peer = 0; peer < shared_.world_size(); ++peer) {
    if (!is_at_least(load(counters(peer).done), rounds_to_be_done())) return false;
  }
  return true;
}

std::byte* SharedMemory::Channel::open(Clock::time_point deadline) {
  const Clock::time_point end_of_spin = Clock::now() + options_.spin;  // one limit for all peers
  for (int64_t peer = 0; peer < shared_.world_size(); ++peer) {
    shared_.wait_until(counters(peer).done, rounds_to_be_done(), deadline, end_of_spin);
  }
  return outbox(shared_.rank(), num_sent_).content();
}

void SharedMemory::Channel::send(const Call& call) {
  Outbox& mine = outbox(shared_.rank(), num_sent_);
  mine.call.fill('\0');
  std::copy_n(call.name.begin(), std::min(call.name.size(), mine.call.size() - 1), mine.call.begin());
  mine.num_bytes = call.num_bytes;
  set_and_wake(counters(shared_.rank()).sent, ++num_sent_);
}

std::byte* SharedMemory::Channel::receive(int64_t peer, const Call& call, Clock::time_point deadline) {
  if (std::exchange(spun_for_, num_done_) != num_done_) end_of_spin_ = Clock::now() + options_.spin;
  shared_.wait_until(counters(peer).sent, num_done_ + 1, deadline, end_of_spin_);
  Outbox& theirs = outbox(peer, num_done_);
  if (theirs.call.data() != call.name || theirs.num_bytes != call.num_bytes) {
    throw std::runtime_error(fmt::format("rank {} calls {} of {} bytes, and this one {} of {} bytes",
                                         shared_.ranks_[static_cast<size_t>(peer)], theirs.call.data(),
                                         theirs.num_bytes, call.name, call.num_bytes));
  }
  return theirs.content();
}

void SharedMemory::Channel::done() { set_and_wake(counters(shared_.rank()).done, ++num_done_); }

// Rank 0 creates the memory; the others open it as a file of rank 0's process, so that it needs no name. It is used
// only if every rank has mapped it.
std::shared_ptr<SharedMemory> SharedMemory::connect(const GroupConfig& group,
                                                    const std::vector<ChannelOptions>& channels, bool willing) {
  size_t num_bytes = sizeof(Header);
  for (const ChannelOptions& options : channels) num_bytes += Channel::num_bytes(group.world_size(), options);
  const std::optional<std::string> host = host_identity(group.transport);
  std::string why_not;
  if (!host) why_not = "the host does not say which one it is (/proc)";
  if (!willing) why_not = "shared memory is turned off (FULGUR_SHARED_MEMORY=0)";
  willing = willing && host.has_value();
  const bool makes_it = willing && group.rank == 0;
  const Descriptor made(makes_it ? ::memfd_create("fulgur", MFD_CLOEXEC) : -1);
  if (makes_it && (made.get() < 0 || ::ftruncate(made.get(), static_cast<off_t>(num_bytes)) != 0)) {
    why_not =
        fmt::format("{} bytes of memory cannot be made for the ranks to share: {}", num_bytes, std::strerror(errno));
    willing = false;
  }
  const std::string place = willing ? fmt::format("{} {}", *host, num_bytes) : "";
  const std::vector<std::string> others =
      exchange_texts(group, "place", fmt::format("{}\n{} {}", place, ::getpid(), made.get()));

  std::shared_ptr<SharedMemory> shared(new SharedMemory(group));
  std::string path;
  bool works = willing, is_expected_to = willing;  // is_expected_to: all are on one host and willing
  for (int64_t rank = 0; is_expected_to && rank < group.world_size(); ++rank) {
    std::istringstream words(others[static_cast<size_t>(rank)]);
    std::string its_place;
    int process = 0, descriptor = 0;
    std::getline(words, its_place);
    words >> process >> descriptor;
    if (rank == 0) path = fmt::format("/proc/{}/fd/{}", process, descriptor);
    is_expected_to = first_word(its_place) == first_word(place);
    works = works && its_place == place && shared->watch(process);
  }
  if (works && is_expected_to) {
    const Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    works = shared->map(opened.get(), num_bytes, channels);
  }
  works = works && is_expected_to;
  if (group.transport.kind == TransportKind::shared_memory) {
    const std::string_view place_of_first = first_word(others.front());
    if (why_not.empty() && !place_of_first.starts_with('\n') && place_of_first != first_word(place)) {
      why_not = fmt::format("on another host than rank {}", group.ranks.front());
    }
    if (why_not.empty() && is_expected_to && !works) why_not = "may not see the memory of another rank";
    check_every_rank_can(group, "shared_memory", why_not);
  }
  const std::vector<std::string> answers = exchange_texts(group, "works", works ? "yes" : "no");
  if (std::ranges::count(answers, "yes") == group.world_size()) return shared;
  if (is_expected_to && group.rank == 0) warn_of_network();
  return nullptr;
}

SharedMemory::SharedMemory(const GroupConfig& group) : rank_(group.rank), ranks_(group.ranks) {}

SharedMemory::~SharedMemory() {
  if (memory_ != nullptr) ::munmap(memory_, num_bytes_);
  for (const pollfd& process : processes_) {
    if (process.fd >= 0) ::close(process.fd);
  }
}

// This process itself is not watched; poll() ignores a negative descriptor.
bool SharedMemory::watch(int process) {
  const bool is_own = process == ::getpid();
  const auto descriptor = is_own ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
  processes_.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
  return is_own || descriptor >= 0;
}

bool SharedMemory::map(int descriptor, size_t num_bytes, const std::vector<ChannelOptions>& channels) {
  struct stat file{};
  if (::fstat(descriptor, &file) != 0 || static_cast<size_t>(file.st_size) != num_bytes) return false;
  void* const memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return false;
  memory_ = static_cast<std::byte*>(memory);
  num_bytes_ = num_bytes;
  std::byte* next = memory_ + sizeof(Header);
  for (const ChannelOptions& options : channels) {
    channels_.push_back(std::make_unique<Channel>(*this, next, options));
    next += Channel::num_bytes(world_size(), options);
  }
  return true;
}

void SharedMemory::abort() { std::atomic_ref(reinterpret_cast<Header*>(memory_)->aborted).store(1); }

std::optional<std::string> SharedMemory::trouble(Clock::time_point deadline) const {
  if (load(reinterpret_cast<Header*>(memory_)->aborted) != 0) return "a rank has aborted";
  std::vector<pollfd> processes = processes_;  // a copy, as several threads may wait
  if (::poll(processes.data(), processes.size(), 0) > 0) {
    const auto ended = std::ranges::find_if(processes, [](const pollfd& process) { return process.revents != 0; });
    return fmt::format("the process of rank {} has ended", ranks_[static_cast<size_t>(ended - processes.begin())]);
  }
  if (Clock::now() > deadline) return "timed out";
  return std::nullopt;
}

void SharedMemory::wait_until(uint32_t& counter, uint32_t least, Clock::time_point deadline,
                              Clock::time_point end_of_spin) const {
  do {
    if (is_at_least(load(counter), least)) return;
    relax();
  } while (Clock::now() < end_of_spin);
  for (bool is_time_to_look = false;;) {
    const std::optional<std::string> why = is_time_to_look ? trouble(deadline) : std::nullopt;
    const uint32_t value = load(counter);  // read after trouble(): a process that has ended may have sent before
    if (is_at_least(value, least)) return;
    if (why) throw std::runtime_error(*why);
    is_time_to_look = !sleep_while(counter, value, kLookAround);
  }
}

}  // namespace fulgur
