#include "fulgur/data/data_loader.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>
#include <utility>

#include "fulgur/base/cores_of_process.h"
#include "fulgur/base/error.h"
#include "fulgur/base/intra_op_threads.h"
#include "fulgur/base/trace.h"

namespace fulgur {
namespace {

void check(const DataLoaderOptions& options) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw UsageError("DataLoader: " + message);
  };
  const bool chooses_batches = options.batch_sampler != nullptr;
  require(options.batch_size >= 1, fmt::format("batch_size must be at least 1; got {}", options.batch_size));
  require(!options.shuffle || !options.sampler,
          "shuffle and sampler both say in which order to read; leave one of them out");
  require(!chooses_batches || (options.batch_size == 1 && !options.shuffle && !options.sampler && !options.drop_last),
          "batch_sampler says what each batch has; leave out batch_size, shuffle, sampler and drop_last");
  require(options.prefetch_batches >= 1,
          fmt::format("prefetch_batches must be at least 1; got {}", options.prefetch_batches));
  constexpr double kLongestTimeout = 1e9;  // s; 30 years
  require(options.timeout_s >= 0 && options.timeout_s <= kLongestTimeout,
          fmt::format("timeout_s must be from 0 to {:g}; got {}", kLongestTimeout, options.timeout_s));
}

std::shared_ptr<const Sampler> choose_sampler(const Dataset& dataset, const DataLoaderOptions& options) {
  if (options.batch_sampler) return nullptr;
  if (options.sampler) return options.sampler;
  if (options.shuffle) return std::make_shared<RandomSampler>(dataset.size(), options.seed);
  return std::make_shared<SequentialSampler>(dataset.size());
}

at::Tensor global_random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

Workers::Workers(std::string_view text) {
  if (text == "auto") return;
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 0) {
    throw UsageError(fmt::format("'{}' is no number of workers; write 0, 1, 2, ... or auto", text));
  }
  count_ = count;
}

std::string Workers::to_string() const { return count_ ? fmt::format("{}", *count_) : "auto"; }

int64_t Workers::count(int64_t num_cores) const {
  return count_ ? *count_ : std::max<int64_t>((num_cores > 0 ? num_cores : std::ssize(cores_of_process())) - 1, 0);
}

void DataLoaderOptions::describe(FieldVisitor& visit) {
  visit({.name = "batch_size", .help = "samples in a batch", .min = 1}, &batch_size);
  visit({.name = "shuffle", .help = "read the samples in a new order every epoch"}, &shuffle);
  visit({.name = "seed", .help = "number that decides the orders, and what samples draw"}, &seed);
  visit({.name = "drop_last", .help = "leave out a last batch that is shorter"}, &drop_last);
  visit({.name = "workers", .help = "threads that read ahead, or auto: the cores of a rank but one"},
        TextField{.set = [this](std::string_view text) { workers = Workers(text); },
                  .get = [this] { return workers.to_string(); }});
  visit({.name = "prefetch_batches", .help = "batches that each worker reads ahead", .min = 1}, &prefetch_batches);
  visit({.name = "timeout_s", .help = "longest time to wait for a worker; 0: any", .unit = "s", .min = 0}, &timeout_s);
  visit({.name = "infinite", .help = "let one pass over the samples follow another, so that an epoch never ends"},
        &infinite);
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options)
    : options_(std::move(options)) {
  if (dataset == nullptr) throw UsageError("DataLoader: the dataset is a null pointer");
  check(options_);
  cut_ = {.sampler = choose_sampler(*dataset, options_),
          .batch_sampler = options_.batch_sampler,
          .batch_size = options_.batch_size,
          .drop_last = options_.drop_last,
          .infinite = options_.infinite,
          .num_samples = dataset->size()};
  digest_ = dataset->digest();
  source_ = std::make_shared<Source>(Source{std::move(dataset), options_.seed, options_.collate});
}

DataLoader::~DataLoader() { stop_workers(); }

std::shared_ptr<DataLoader> DataLoader::make(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options) {
  return std::make_shared<DataLoader>(std::move(dataset), std::move(options));
}

void DataLoader::begin_epoch(int64_t epoch) {
  drop_pending();
  const int64_t num_workers = options_.workers.count(cut_.shard.num_cores);
  if (num_workers != num_workers_) stop_workers();
  num_workers_ = num_workers;
  epoch_ = epoch;
  place_ = 0;
  plan_.emplace(cut_, epoch, place_);
}

std::optional<Batch> DataLoader::next() {
  if (!plan_) return std::nullopt;
  try {
    return num_workers_ == 0 ? read_now() : take_from_workers();
  } catch (...) {
    stop_workers();
    plan_.emplace(cut_, epoch_, place_);
    throw;
  }
}

std::optional<Batch> DataLoader::read_now() {
  const auto planned = plan_->next();
  if (!planned) return std::nullopt;
  Batch batch = source_->read(*planned);
  place_ = plan_->place();
  return batch;
}

std::optional<Batch> DataLoader::take_from_workers() {
  const at::Tensor random_before = is_first_ ? global_random_state() : at::Tensor();
  read_ahead();
  if (pending_.empty()) return std::nullopt;
  const Pending first = pending_.front();
  wait_for(first.read);
  first.read.get();
  if (is_first_ && !global_random_state().equal(random_before)) {
    throw DataError(fmt::format(
        "{} drew from torch's global generator in a worker, where the numbers depend on which thread comes first; draw "
        "from the Random that get() is handed, as in at::rand({{3}}, random.generator()), or set workers to 0",
        source_->dataset->name()));
  }
  is_first_ = false;
  pending_.pop_front();
  read_ahead();
  place_ = first.place_after;
  return std::move(*first.batch);
}

Batch DataLoader::Source::read(const PlannedBatch& planned) const {
  const int64_t* index = planned.samples.const_data_ptr<int64_t>();
  std::vector<Random> random;
  random.reserve(planned.epochs.size());
  for (size_t i = 0; i < planned.epochs.size(); ++i) {
    random.push_back(SampleRandom{.seed = seed, .epoch = planned.epochs[i]}.of(index[i]));
  }
  if (!collate) return dataset->get_batch(planned.samples, random);
  std::vector<Batch> samples;
  samples.reserve(random.size());
  for (Random& of_sample : random) samples.push_back(get_sample(*dataset, *index++, of_sample));
  return collate(samples);
}

// Queues batches for the workers, up to prefetch_batches for each.
void DataLoader::read_ahead() {
  if (!workers_) {
    const ScopedIntraOpThreads restored;
    workers_ = std::make_unique<JobQueue>(static_cast<size_t>(num_workers_), use_one_intra_op_thread);
  }
  if (!is_wanted_) is_wanted_ = std::make_shared<std::atomic<bool>>(true);
  while (std::ssize(pending_) < num_workers_ * options_.prefetch_batches) {
    auto planned = plan_->next();
    if (!planned) return;
    auto batch = std::make_shared<Batch>();
    auto job = [source = source_, batch, planned = *std::move(planned), is_wanted = is_wanted_,
                pins = cut_.shard.for_accelerator] {
      if (!*is_wanted) return;
      const trace::Span span("read a batch");
      *batch = source->read(planned);
      if (pins) *batch = batch->pin();
    };
    pending_.push_back({.read = workers_->run(std::move(job)), .batch = batch, .place_after = plan_->place()});
  }
}

void DataLoader::wait_for(const std::shared_future<void>& read) const {
  if (!is_done_in_time(read)) {
    throw DataError(fmt::format("a worker has read a batch of {} for more than {} s (timeout_s)",
                                source_->dataset->name(), options_.timeout_s));
  }
}

bool DataLoader::is_done_in_time(const std::shared_future<void>& read) const {
  if (options_.timeout_s > 0) {
    return read.wait_for(std::chrono::duration<double>(options_.timeout_s)) == std::future_status::ready;
  }
  read.wait();
  return true;
}

void DataLoader::drop_pending() {
  if (is_wanted_) *is_wanted_ = false;
  is_wanted_.reset();
  dropped_.insert(dropped_.end(), pending_.begin(), pending_.end());
  std::erase_if(dropped_, [](const Pending& one) {
    return one.read.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
  pending_.clear();
  is_first_ = true;
}

// Waits until the threads have finished their jobs. A thread that hangs cannot be ended: after timeout_s it is leaked.
void DataLoader::stop_workers() {
  drop_pending();
  const bool all_end = std::ranges::all_of(dropped_, [this](const Pending& one) { return is_done_in_time(one.read); });
  dropped_.clear();
  if (!all_end) static_cast<void>(workers_.release());
  workers_.reset();
}

std::optional<int64_t> DataLoader::num_batches() const {
  if (cut_.infinite) return std::nullopt;
  const int64_t num_samples = cut_.share_of(cut_.num_items());
  const bool has_rest = num_samples % cut_.batch_size != 0 && !cut_.drop_last;
  return num_samples / cut_.batch_size + (has_rest ? 1 : 0);
}

State DataLoader::position() const {
  State position;
  position.set(cut_.sampler ? "samples" : "batches", place_);
  position.set("of", cut_.num_items());
  position.set("size", source_->dataset->size());
  if (!digest_.empty()) position.set("digest", digest_);
  if (plan_) position.set("order", static_cast<int64_t>(plan_->order_hash(place_)));
  return position;
}

void DataLoader::go_to(const State& position) {
  const Dataset& dataset = *source_->dataset;
  const auto size = position.get<int64_t>("size");
  const std::string* digest = position.find<std::string>("digest");
  const bool is_other = digest != nullptr && !digest_.empty() && *digest != digest_;
  if (size != dataset.size() || is_other) {
    throw CheckpointError(fmt::format(
        "the checkpoint is in the middle of an epoch over {} samples, but {} has {}{}; resume with the same data, or "
        "from a checkpoint at the end of an epoch",
        size, dataset.name(), dataset.size(), is_other ? ", and others (its digest is another one)" : ""));
  }
  const std::string_view unit = cut_.sampler ? "samples" : "batches";
  const int64_t* place = position.find<int64_t>(unit);
  const bool is_here = place != nullptr && *place >= 0 && (cut_.infinite || *place <= cut_.num_items());
  if (!is_here || position.get<int64_t>("of") != cut_.num_items()) {
    throw CheckpointError(
        fmt::format("the checkpoint has no place among the {} {} of an epoch; resume with the sampler that it was "
                    "written with, or from a checkpoint at the end of an epoch",
                    cut_.num_items(), unit));
  }
  EpochPlan plan(cut_, epoch_, *place);
  const int64_t* order = position.find<int64_t>("order");  // null: written by an earlier version
  if (order != nullptr && static_cast<uint64_t>(*order) != plan.order_hash(*place)) {
    throw CheckpointError(
        fmt::format("the checkpoint is in the middle of an epoch over {} in another order (its hash is another one); "
                    "resume with the sampler and the seed that it was written with, or from a checkpoint at the end of "
                    "an epoch",
                    dataset.name()));
  }
  drop_pending();
  place_ = *place;
  plan_.emplace(std::move(plan));
}

State DataLoader::state() const {
  State state;
  state.set("seed", static_cast<int64_t>(source_->seed));
  return state;
}

void DataLoader::load_state(const State& state) {
  const int64_t* seed = state.find<int64_t>("seed");
  if (seed == nullptr) return;
  const auto loaded = static_cast<uint64_t>(*seed);
  source_ = std::make_shared<Source>(Source{source_->dataset, loaded, source_->collate});
  if (options_.shuffle) cut_.sampler = std::make_shared<RandomSampler>(source_->dataset->size(), loaded);
}

bool DataLoader::set_shard(const DataShard& shard) {
  if (shard.even && cut_.num_items() < shard.world_size) {
    throw UsageError(fmt::format("{} has {} {}, fewer than the {} ranks; use fewer devices", source_->dataset->name(),
                                 cut_.num_items(), cut_.sampler ? "samples" : "batches", shard.world_size));
  }
  cut_.shard = shard;
  return true;
}

}  // namespace fulgur
