// What activation checkpointing saves and costs: forward and backward of a deep residual MLP with every block
// checkpointed, with groups of blocks checkpointed, and without checkpoints. Memory is the allocator's peak above
// what was allocated before the pass (weights and gradients).
//   OMP_NUM_THREADS=1 ./bazelw run //bench:activation_checkpoint
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <fmt/format.h>

#include <algorithm>

#include "bench/side_by_side.h"
#include "fulgur.h"

namespace {

using namespace fulgur;

constexpr int64_t kBlocks = 16, kWidth = 256, kRows = 512;

// The CPU's allocator, which also counts the bytes in use.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    in_use_ += num_bytes;
    peak_ = std::max(peak_, in_use_);
    auto* block = static_cast<char*>(c10::alloc_cpu(num_bytes + kHeader));
    *reinterpret_cast<size_t*>(block) = num_bytes;
    return {block + kHeader, block + kHeader, &CountingAllocator::free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::free; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  void start() { peak_ = before_ = in_use_; }
  double peak_mib() const { return static_cast<double>(peak_ - before_) / (1 << 20); }

  static CountingAllocator& get() {
    static auto* allocator = new CountingAllocator;  // never freed: tensors of static lifetime use it to the end
    return *allocator;
  }

 private:
  static constexpr size_t kHeader = 64;  // bytes before the data, which hold its size; keeps the alignment

  static void free(void* data) {
    auto* block = static_cast<char*>(data) - kHeader;
    get().in_use_ -= *reinterpret_cast<size_t*>(block);
    c10::free_cpu(block);
  }

  size_t in_use_ = 0, peak_ = 0, before_ = 0;
};

struct Block : torch::nn::Module {
  torch::nn::Sequential layers{nullptr};
  Block() {
    using namespace torch::nn;
    layers = register_module("layers", Sequential(LayerNorm(LayerNormOptions({kWidth})), Linear(kWidth, 4 * kWidth),
                                                  GELU(), Linear(4 * kWidth, kWidth), Dropout(0.1)));
  }
  at::Tensor forward(const at::Tensor& x) { return x + layers->forward(x); }
};

std::vector<std::shared_ptr<Block>> make_blocks() {
  seed_everything(1);
  std::vector<std::shared_ptr<Block>> blocks;
  for (int64_t i = 0; i < kBlocks; ++i) blocks.push_back(std::make_shared<Block>());
  return blocks;
}

// Returns the peak of one pass in MiB. `group`: blocks per checkpoint; 0: no checkpoints.
double train_step(const std::vector<std::shared_ptr<Block>>& blocks, const at::Tensor& input, int64_t group) {
  CountingAllocator::get().start();
  at::Tensor x = input;
  for (int64_t first = 0; first < kBlocks; first += std::max<int64_t>(group, 1)) {
    const auto run = [&blocks, first, last = first + std::max<int64_t>(group, 1)](at::Tensor h) {
      for (int64_t i = first; i < last; ++i) h = blocks[static_cast<size_t>(i)]->forward(h);
      return h;
    };
    x = group > 0 ? checkpoint(run, x) : run(x);
  }
  x.square().mean().backward();
  return CountingAllocator::get().peak_mib();
}

}  // namespace

int main() {
  c10::SetCPUAllocator(&CountingAllocator::get(), /*priority=*/100);
  at::set_num_threads(1);
  const auto blocks = make_blocks();
  const at::Tensor input = torch::randn({kRows, kWidth});
  constexpr int64_t kGroups[] = {0, 1, 2, 4};
  train_step(blocks, input, 0);  // allocates the gradients, which stay allocated
  std::vector<double> peaks(std::size(kGroups));
  std::vector<bench::Contender> contenders;
  for (size_t i = 0; i < std::size(kGroups); ++i) {
    const int64_t group = kGroups[i];
    contenders.push_back({group == 0 ? "plain" : fmt::format("checkpoint of {} block(s)", group),
                          [&, i, group] { peaks[i] = train_step(blocks, input, group); }});
  }
  bench::side_by_side("forward and backward", 1, contenders, /*rounds=*/7);
  for (size_t i = 0; i < peaks.size(); ++i) {
    fmt::print("{:<28} peak {:7.1f} MiB  {:.2f} x\n", contenders[i].name, peaks[i], peaks[i] / peaks[0]);
  }
}
