// Ranks that exchange by MPI: a program that depends on //distributed:mpi_transport has the transport "mpi". Its ranks
// are processes that mpirun or srun has started, one for each rank of MPI_COMM_WORLD. MPI is initialised by the first
// group unless the program has done so, and finalised when the process exits if every group has ended well.
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <mpi/mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fulgur/base/crc32.h"
#include "fulgur/base/error.h"
#include "fulgur/distributed/group.h"
#include "fulgur/distributed/hierarchical_transport.h"
#include "fulgur/distributed/host_transport.h"
#include "fulgur/distributed/transports.h"

namespace fulgur {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kDataTag = 0, kAbortTag = 1;
constexpr int64_t kMostElements = 1 << 30;  // MPI takes fewer than 2^31 in one call
constexpr int64_t kDefaultStagingBytes = 8 << 20;
// A wait first gives its core to other threads, then sleeps, so that it does not compete with backward.
constexpr std::chrono::microseconds kYields{200}, kSleep{50};

std::atomic<bool> a_group_has_failed = false;
std::atomic<int64_t> num_open_groups = 0;  // groups that connect or are connected, and have not ended
std::atomic<pid_t> initialized_by = 0;     // the process whose MPI fulgur has initialised; 0: none

void check(int code) {
  if (code == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int size = 0;
  MPI_Error_string(code, text.data(), &size);
  text.resize(static_cast<size_t>(size));
  throw std::runtime_error(text);
}

// A group that connects or is connected. If an exception ends it before end(), or the process ends first, other ranks
// may wait for this one.
class OpenGroup {
 public:
  OpenGroup() { ++num_open_groups; }
  ~OpenGroup() {
    if (has_ended_) return;
    a_group_has_failed = true;
    --num_open_groups;
  }
  OpenGroup(const OpenGroup&) = delete;
  OpenGroup& operator=(const OpenGroup&) = delete;

  void end() {
    if (!has_ended_.exchange(true)) --num_open_groups;
  }

 private:
  std::atomic<bool> has_ended_ = false;
};

// MPI_Finalize waits for every rank, so it is left out after a failure, and in a child that was forked.
void finalize() {
  if (initialized_by == ::getpid() && !a_group_has_failed && num_open_groups == 0) MPI_Finalize();
}

// Initialises MPI if the program has not. Groups have threads of their own, which all call MPI. Returns why this
// process cannot use it; empty if it can.
std::string initialize() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  int is_initialized = 0, threads = 0;
  MPI_Initialized(&is_initialized);
  if (is_initialized) {
    MPI_Query_thread(&threads);
    if (threads >= MPI_THREAD_MULTIPLE) return "";
    return "the program has initialised MPI so that not every thread may call it; call MPI_Init_thread with "
           "MPI_THREAD_MULTIPLE, or leave it to fulgur";
  }
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &threads));
  initialized_by = ::getpid();
  std::atexit(finalize);
  if (threads >= MPI_THREAD_MULTIPLE) return "";
  return "this MPI does not let several threads call it (MPI_THREAD_MULTIPLE); use one that does, or write transport = "
         "'auto'";
}

// The ranks of the group within MPI_COMM_WORLD, in the group's order.
std::vector<int> places_in_mpi(const GroupConfig& group) {
  int rank = 0, world_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  std::map<int, int64_t> owners;
  std::vector<int> places;
  for (const std::string& text : exchange_texts(group, "mpi", std::to_string(rank))) {
    const int64_t owner = group.ranks[places.size()];
    places.push_back(std::stoi(text));
    const auto [other, is_new] = owners.try_emplace(places.back(), owner);
    if (is_new) continue;
    wait_until_all_know(group, "mpi");
    throw UsageError(
        fmt::format("strategy.transport = 'mpi', but ranks {} and {} are both rank {} of MPI's {}; start all ranks by "
                    "one mpirun or srun, or write transport = 'auto'",
                    other->second, owner, places.back(), world_size));
  }
  return places;
}

// MPI moves elements, and adds none.
MPI_Datatype type_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 8:
      return MPI_UINT64_T;
    case 4:
      return MPI_UINT32_T;
    case 2:
      return MPI_UINT16_T;
    default:
      return MPI_UINT8_T;
  }
}

// MPI counts elements in an int.
int count_of(int64_t num_elements) {
  if (num_elements <= std::numeric_limits<int>::max()) return static_cast<int>(num_elements);
  throw std::runtime_error(
      fmt::format("MPI moves at most {} elements at once, and not {}", std::numeric_limits<int>::max(), num_elements));
}

class Communicator {
 public:
  explicit Communicator(MPI_Comm comm) : comm_(comm) { MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN); }
  ~Communicator() {
    if (!a_group_has_failed) MPI_Comm_free(&comm_);
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  MPI_Comm get() const { return comm_; }

 private:
  MPI_Comm comm_;
};

MPI_Comm make_comm(const GroupConfig& group) {
  const std::vector<int> places = places_in_mpi(group);
  MPI_Group everyone = MPI_GROUP_NULL, mine = MPI_GROUP_NULL;
  check(MPI_Comm_group(MPI_COMM_WORLD, &everyone));
  check(MPI_Group_incl(everyone, static_cast<int>(places.size()), places.data(), &mine));
  const int tag = static_cast<int>(crc32(group.name) % 32767);  // tags up to that always exist
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_create_group(MPI_COMM_WORLD, mine, tag, &comm));
  MPI_Group_free(&mine);
  MPI_Group_free(&everyone);
  return comm;
}

MPI_Comm duplicate_of(MPI_Comm comm) {
  MPI_Comm duplicate = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &duplicate));
  return duplicate;
}

// Requests that have been started and not yet awaited, with the tensors that MPI reads and writes.
struct Started {
  std::vector<MPI_Request> requests{};
  std::vector<at::Tensor> tensors{};

  MPI_Request* add() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

// MPI may still write to the tensors of requests that were never awaited, so their memory is never freed.
void abandon(Started& started) {
  static auto* const abandoned = new std::vector<at::Tensor>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  abandoned->insert(abandoned->end(), started.tensors.begin(), started.tensors.end());
}

// Moves tensors by MPI. For sums ranks send parts to one another, and each adds its own in the order of ranks: Open
// MPI's nonblocking sums leave the order open, and take longer on one machine (docs/benchmarks.md, Sums over MPI). All
// else goes by MPI's nonblocking collectives. Small exchanges and barriers have communicators of their own: they may
// run beside the others, and begin in another order on another rank.
class MpiTransport final : public HostTransport {
 public:
  explicit MpiTransport(const GroupConfig& group)
      : timeout_(group.timeout),
        staging_bytes_(group.transport.staging_bytes.value_or(kDefaultStagingBytes)),
        rank_(group.rank),
        world_size_(group.world_size()),
        large_(make_comm(group)),
        small_(duplicate_of(large_.get())),
        barriers_(duplicate_of(large_.get())) {}

  void all_reduce(const at::Tensor& flat, ReduceOp op) override;
  bool all_reduces_in_rank_order() const override { return true; }
  void reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into, const RankRanges& ranges) override;
  void all_gather(const at::Tensor& flat, const RankRanges& ranges) override;
  void broadcast(const at::Tensor& flat, int64_t root) override;
  void barrier() override;
  std::shared_ptr<SmallAllReduce> small_all_reduce(const at::Tensor& flat, ReduceOp op) override;
  void abort() override;
  void end() override;

 private:
  class Small;

  template <class Post>
  void run(Started started, Clock::time_point deadline, const Post& post);
  void wait(Started& started, Clock::time_point deadline);
  void fail(Started& started);
  bool is_aborted();
  Clock::time_point deadline() const { return Clock::now() + timeout_; }

  OpenGroup open_{};  // declared first: it also sees that a communicator cannot be made
  const std::chrono::milliseconds timeout_;
  const int64_t staging_bytes_;
  const int64_t rank_, world_size_;
  Communicator large_, small_, barriers_;
  std::atomic<bool> aborted_ = false, ended_ = false;
  std::atomic<int> num_waiting_ = 0;
};

bool MpiTransport::is_aborted() {
  int is_told = 0;
  if (!aborted_) check(MPI_Iprobe(MPI_ANY_SOURCE, kAbortTag, small_.get(), &is_told, MPI_STATUS_IGNORE));
  if (is_told) aborted_ = true;
  return aborted_ || ended_;
}

// MPI makes progress while somebody asks whether it is done.
void MpiTransport::wait(Started& started, Clock::time_point deadline) {
  const Clock::time_point end_of_yields = Clock::now() + kYields;
  ++num_waiting_;
  try {
    while (true) {
      int is_done = 0;
      check(MPI_Testall(static_cast<int>(started.requests.size()), started.requests.data(), &is_done,
                        MPI_STATUSES_IGNORE));
      if (is_done) break;
      if (is_aborted()) throw std::runtime_error("the transfer was aborted");
      const Clock::time_point now = Clock::now();
      if (now > deadline) throw std::runtime_error("not every rank has answered within the timeout");
      if (now < end_of_yields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kSleep);
      }
    }
  } catch (...) {
    --num_waiting_;
    fail(started);
    throw;
  }
  --num_waiting_;
}

void MpiTransport::fail(Started& started) {
  a_group_has_failed = true;
  abandon(started);
  abort();
}

// Posts requests, and waits for them.
template <class Post>
void MpiTransport::run(Started started, Clock::time_point deadline, const Post& post) {
  try {
    post(started);
  } catch (...) {
    fail(started);
    throw;
  }
  wait(started, deadline);
}

void MpiTransport::all_reduce(const at::Tensor& flat, ReduceOp op) {
  const RankRanges ranges = RankRanges::of_whole(flat, world_size_);
  reduce_scatter(flat, op, ranges.of(flat, rank_), ranges);
  all_gather(flat, ranges);
}

// Works chunk by chunk: each rank receives one chunk from every other rank, then adds.
void MpiTransport::reduce_scatter(const at::Tensor& flat, ReduceOp op, const at::Tensor& into,
                                  const RankRanges& ranges) {
  const Clock::time_point until = deadline();
  const int64_t largest = ranges.range(0, flat).size();
  const int64_t num_peers = std::max<int64_t>(world_size_ - 1, 1);
  const int64_t chunk_size =
      std::clamp<int64_t>(staging_bytes_ / (num_peers * flat.element_size()), 1, std::max<int64_t>(largest, 1));
  const at::Tensor staged = at::empty({world_size_, chunk_size}, flat.options());
  const auto chunk_of = [&](const at::Tensor& range, int64_t begin) {
    const int64_t from = std::min(begin, range.numel());
    return range.narrow(0, from, std::min(chunk_size, range.numel() - from));
  };
  const at::Tensor mine = ranges.of(flat, rank_);
  for (int64_t begin = 0; begin < largest; begin += chunk_size) {
    const at::Tensor own = chunk_of(mine, begin);
    const auto received = [&](int64_t peer) { return staged[peer].narrow(0, 0, own.numel()); };
    run({.tensors = {flat, staged}}, until, [&](Started& started) {
      for (int64_t step = 1; step < world_size_; ++step) {
        const int64_t from = (rank_ + world_size_ - step) % world_size_, to = (rank_ + step) % world_size_;
        const at::Tensor theirs = chunk_of(ranges.of(flat, to), begin);
        if (own.numel() > 0) {
          check(MPI_Irecv(received(from).mutable_data_ptr(), count_of(own.numel()), type_of(flat),
                          static_cast<int>(from), kDataTag, large_.get(), started.add()));
        }
        if (theirs.numel() > 0) {
          check(MPI_Isend(theirs.const_data_ptr(), count_of(theirs.numel()), type_of(flat), static_cast<int>(to),
                          kDataTag, large_.get(), started.add()));
        }
      }
    });
    if (own.numel() > 0) combine_in_rank_order(chunk_of(into, begin), own, rank_, world_size_, op, received);
  }
}

void MpiTransport::all_gather(const at::Tensor& flat, const RankRanges& ranges) {
  std::vector<int> counts, begins;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    const ElementRange range = ranges.range(rank, flat);
    counts.push_back(count_of(range.size()));
    begins.push_back(count_of(range.begin));
  }
  run({.tensors = {flat}}, deadline(), [&](Started& started) {
    check(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, flat.mutable_data_ptr(), counts.data(), begins.data(),
                          type_of(flat), large_.get(), started.add()));
  });
}

// MPI counts elements by an int.
void MpiTransport::broadcast(const at::Tensor& flat, int64_t root) {
  run({.tensors = {flat}}, deadline(), [&](Started& started) {
    for (const at::Tensor& piece : flat.split(kMostElements)) {
      check(MPI_Ibcast(piece.mutable_data_ptr(), count_of(piece.numel()), type_of(piece), static_cast<int>(root),
                       large_.get(), started.add()));
    }
  });
}

void MpiTransport::barrier() {
  run({}, deadline(), [&](Started& started) { check(MPI_Ibarrier(barriers_.get(), started.add())); });
}

// Gathers the tensors of all ranks; then every rank adds them in the order of ranks.
class MpiTransport::Small final : public SmallAllReduce {
 public:
  Small(MpiTransport& transport, const at::Tensor& flat, ReduceOp op)
      : transport_(transport),
        flat_(flat),
        op_(op),
        deadline_(transport.deadline()),
        rows_(at::empty({transport.world_size_, flat.numel()}, flat.options())) {
    started_.tensors = {flat_, rows_};
    const int num_bytes = count_of(static_cast<int64_t>(flat_.nbytes()));
    check(MPI_Iallgather(flat_.const_data_ptr(), num_bytes, MPI_BYTE, rows_.mutable_data_ptr(), num_bytes, MPI_BYTE,
                         transport.small_.get(), started_.add()));
  }
  ~Small() override {
    if (!is_finished_) abandon(started_);
  }
  Small(const Small&) = delete;
  Small& operator=(const Small&) = delete;

  void finish() override {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (is_finished_) return;
    try {
      transport_.wait(started_, deadline_);
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    is_finished_ = true;
    combine_in_rank_order(flat_, flat_, transport_.rank_, transport_.world_size_, op_,
                          [&](int64_t peer) { return rows_[peer]; });
  }

  // MPI passes on what other ranks need while somebody waits for it.
  bool is_sent() const override { return false; }

 private:
  MpiTransport& transport_;
  const at::Tensor flat_;
  const ReduceOp op_;
  const Clock::time_point deadline_;
  const at::Tensor rows_;  // [world_size, flat.numel()]
  Started started_{};
  std::mutex mutex_;
  bool is_finished_ = false;
  std::exception_ptr error_{};
};

std::shared_ptr<SmallAllReduce> MpiTransport::small_all_reduce(const at::Tensor& flat, ReduceOp op) {
  if (is_aborted()) throw std::runtime_error("the transfer was aborted");
  return std::make_shared<Small>(*this, flat, op);
}

// The others look for this message while they wait.
void MpiTransport::abort() {
  if (aborted_.exchange(true)) return;
  a_group_has_failed = true;
  static const char nothing = 0;
  for (int64_t step = 1; step < world_size_; ++step) {
    MPI_Request request = MPI_REQUEST_NULL;  // is never awaited: the receiver may be gone
    MPI_Isend(&nothing, 1, MPI_BYTE, static_cast<int>((rank_ + step) % world_size_), kAbortTag, small_.get(), &request);
  }
}

void MpiTransport::end() {
  ended_ = true;
  if (num_waiting_ > 0) abort();
  open_.end();
}

// Ranks of one host share its memory if there are several hosts, so that MPI sends nothing twice between hosts.
Connection connect_mpi(const GroupConfig& group) {
  if (!group.device.is_cpu() || group.transport.kind != TransportKind::mpi) return {};
  OpenGroup connecting;
  check_every_rank_can(group, "mpi", initialize());
  const auto between_all = [](const GroupConfig& of) { return std::make_unique<MpiTransport>(of); };
  std::unique_ptr<HostTransport> transport = connect_two_levels(group, between_all);
  if (transport == nullptr) transport = between_all(group);
  connecting.end();
  return transport;
}

[[maybe_unused]] const bool is_known = [] {
  add_transport(connect_mpi);
  return true;
}();

}  // namespace
}  // namespace fulgur
