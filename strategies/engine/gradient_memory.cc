#include "fulgur/strategies/engine/gradient_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace fulgur {
namespace {

// Regions begin at multiples of it. Of other memory that libtorch frees, little does.
constexpr int64_t kAlignment = 4096;

bool is_aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % kAlignment == 0; }

int64_t round_up(int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t num_bytes(c10::ScalarType dtype, int64_t num_elements) {
  return num_elements * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

struct GradientMemory::Region {
  size_t num_bytes;  // the size of the gradient
  at::Tensor memory;
  bool is_free = true;
};

// Memory from regions inside of scopes, and otherwise from the allocator that the process had before. All of it has one
// deleter, with the memory itself as context, so that raw_allocate() works, which oneDNN's convolutions use.
class GradientMemory::Allocator final : public c10::Allocator {
 public:
  // The one of this process; null if the process uses another. It is never freed, because tensors refer to it.
  static Allocator* of_process() {
    static Allocator* const made = [] {
      c10::Allocator& present = *c10::GetCPUAllocator();
      if (present.raw_deleter() == nullptr) return static_cast<Allocator*>(nullptr);
      auto* const allocator = new Allocator(present);
      made_ = allocator;
      c10::SetCPUAllocator(allocator);
      return allocator;
    }();
    return c10::GetCPUAllocator() == made ? made : nullptr;
  }

  // The regions of the innermost scope of a thread.
  static Regions*& current() {
    static thread_local Regions* regions = nullptr;
    return regions;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    const Regions* const regions = current();
    if (regions != nullptr && num_bytes >= static_cast<size_t>(kLeastBytes)) {
      const auto fits = [&](const Region& region) { return region.num_bytes == num_bytes; };
      if (void* const memory = lend(*regions, fits)) return {memory, memory, &free, c10::kCPU};
    }
    c10::DataPtr memory = wrapped_.allocate(num_bytes);
    static_cast<void>(memory.compare_exchange_deleter(wrapped_.raw_deleter(), &free));
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* dest, const void* src, size_t count) const override { wrapped_.copy_data(dest, src, count); }

  // The memory of a free region for which `fits` is true; null if there is none. Give it to free().
  template <class Fits>
  void* lend(const Regions& regions, const Fits& fits) {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::ranges::find_if(regions, [&](const auto& region) { return region->is_free && fits(*region); });
    if (found == regions.end()) return nullptr;
    void* const memory = (*found)->memory.mutable_data_ptr();
    lent_.emplace(memory, *found);
    (*found)->is_free = false;
    return memory;
  }

  static void free(void* memory) {
    if (memory == nullptr || !is_aligned(memory) || !made_->take_back(memory)) made_->wrapped_.raw_deleter()(memory);
  }

 private:
  explicit Allocator(c10::Allocator& wrapped) : wrapped_(wrapped) {}

  // False if it is not the memory of a region.
  bool take_back(void* memory) {
    std::shared_ptr<Region> region;  // may be the last to hold it, and is dropped without the lock
    const std::lock_guard lock(mutex_);
    const auto found = lent_.find(memory);
    if (found == lent_.end()) return false;
    region = std::move(found->second);
    lent_.erase(found);
    region->is_free = true;
    return true;
  }

  static inline Allocator* made_ = nullptr;

  c10::Allocator& wrapped_;
  std::mutex mutex_{};
  std::unordered_map<void*, std::shared_ptr<Region>> lent_{};
};

void GradientMemory::add(const std::vector<Request>& requests,
                         const std::function<at::Tensor(int64_t num_bytes)>& allocate) {
  if (requests.empty() || Allocator::of_process() == nullptr) return;
  int64_t needed = kAlignment;
  for (const Request& request : requests) needed += round_up(num_bytes(request.dtype, request.region_elements));
  const at::Tensor all = allocate(needed);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(all.const_data_ptr()));
  int64_t begin = round_up(address) - address;
  const auto regions = std::make_shared<Regions>(regions_ ? *regions_ : Regions());
  for (const Request& request : requests) {
    const int64_t length = num_bytes(request.dtype, request.region_elements);
    const auto of_gradient = static_cast<size_t>(num_bytes(request.dtype, request.num_elements));
    const at::Tensor memory = all.narrow(0, begin, length).view(request.dtype);
    regions->push_back(std::make_shared<Region>(Region{.num_bytes = of_gradient, .memory = memory}));
    begin += round_up(length);
  }
  regions_ = regions;
}

ScopedGradientMemory GradientMemory::open() const { return ScopedGradientMemory(regions_); }

at::Tensor GradientMemory::make(c10::ScalarType dtype, int64_t num_elements) const {
  if (regions_ == nullptr) return {};
  const auto fits = [&](const Region& region) {
    return region.memory.scalar_type() == dtype &&
           region.num_bytes == static_cast<size_t>(num_bytes(dtype, num_elements));
  };
  Allocator* const allocator = Allocator::of_process();
  void* const memory = allocator == nullptr ? nullptr : allocator->lend(*regions_, fits);
  if (memory == nullptr) return {};
  return at::for_blob(memory, {num_elements}).context(memory, &Allocator::free).options(dtype).make_tensor();
}

at::Tensor GradientMemory::region_of(const at::Tensor& gradient) const {
  if (regions_ == nullptr) return {};
  const auto is_filled_by_it = [&](const auto& region) {
    return region->memory.const_data_ptr() == gradient.const_data_ptr() && region->num_bytes == gradient.nbytes() &&
           region->num_bytes == gradient.storage().nbytes() && region->memory.scalar_type() == gradient.scalar_type();
  };
  const auto found = std::ranges::find_if(*regions_, is_filled_by_it);
  return found == regions_->end() ? at::Tensor() : (*found)->memory;
}

ScopedGradientMemory::ScopedGradientMemory(std::shared_ptr<GradientMemory::Regions> regions)
    : regions_(std::move(regions)), outer_(GradientMemory::Allocator::current()) {
  if (regions_) GradientMemory::Allocator::current() = regions_.get();
}

ScopedGradientMemory::~ScopedGradientMemory() { GradientMemory::Allocator::current() = outer_; }

}  // namespace fulgur
