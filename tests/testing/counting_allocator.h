#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace fulgur::testing {

// While an instance lives, it counts the bytes of tensors on the CPU. Threading: any.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetAllocator(c10::kCPU)) { c10::SetAllocator(c10::kCPU, this, kPriority); }
  ~CountingAllocator() override { c10::SetAllocator(c10::kCPU, inner_, kPriority); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;

  int64_t live() const { return live_; }  // bytes allocated since construction and not yet freed
  int64_t peak() const { return peak_; }  // highest live() since construction or reset_peak()
  void reset_peak() { peak_ = live_.load(); }

  c10::DataPtr allocate(size_t num_bytes) override {
    // The size is stored in front of the data.
    auto* block = static_cast<char*>(std::aligned_alloc(kAlignment, (num_bytes / kAlignment + 2) * kAlignment));
    const auto size = static_cast<int64_t>(num_bytes);
    std::memcpy(block, &size, sizeof(size));
    live_ += size;
    int64_t peak = peak_;
    while (peak < live_ && !peak_.compare_exchange_weak(peak, live_)) {
    }
    char* data = block + kAlignment;
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

 private:
  static constexpr size_t kAlignment = 64;

  static void free_block(void* data) {
    if (data == nullptr) return;
    char* block = static_cast<char*>(data) - kAlignment;
    int64_t size = 0;
    std::memcpy(&size, block, sizeof(size));
    live_ -= size;
    std::free(block);
  }

  static constexpr uint8_t kPriority = 255;
  static inline std::atomic<int64_t> live_{0}, peak_{0};  // static, because blocks may outlive the instance

  c10::Allocator* inner_;
};

}  // namespace fulgur::testing
