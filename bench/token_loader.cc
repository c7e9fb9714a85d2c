// Batches of 64 windows of 1024 tokens at random places of a mapped file, as TokenDataset hands them out, against
// memcpy of the same bytes from the same places into a buffer that is kept, and against a loop that widens them into
// one. The file has 2^27 tokens of 16 bits and is in the page cache; a round reads 131 MB, more than the caches of a
// CPU hold.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:token_loader
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/checkpoint/memory_map.h"
#include "fulgur/data/files/token_dataset.h"
#include "fulgur/data/files/token_writer.h"
#include "fulgur/data/random.h"

namespace {

using namespace fulgur;
namespace fs = std::filesystem;

constexpr int64_t kTokens = int64_t{1} << 27, kLength = 1024, kBatchSize = 64, kBatches = 1000;
constexpr int64_t kVocabSize = 50'257;  // GPT-2's

void write_tokens(const fs::path& file) {
  TokenWriter writer(file, kVocabSize);
  Random random(0);
  std::vector<uint32_t> piece(1 << 20);
  for (int64_t written = 0; written < kTokens; written += std::ssize(piece)) {
    for (uint32_t& token : piece) token = static_cast<uint32_t>(random.below(kVocabSize));
    writer.write(piece);
  }
  writer.commit();
}

at::Tensor random_indices(int64_t size) {
  Random random(1);
  at::Tensor indices = at::empty({kBatches, kBatchSize}, at::kLong);
  auto* const index = indices.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) index[i] = random.below(size);
  return indices;
}

// Calls `copy` with each window of each batch and its place in the batch.
template <class Copy>
void for_each_window(const uint16_t* tokens, const at::Tensor& indices, const Copy& copy) {
  const auto* const index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) copy(tokens + index[i], i % kBatchSize * kLength);
}

void compare(const fs::path& file) {
  const TokenDataset own(file, {.length = kLength, .stride = 1, .keeps_width = true});
  const TokenDataset wide(file, {.length = kLength, .stride = 1});
  own.verify();  // maps all pages, too
  wide.verify();
  const auto map = MemoryMap::open(file);
  const auto* const tokens = reinterpret_cast<const uint16_t*>(map->bytes().data() + TokenHeader::kBytes);
  for (int64_t i = 0; i < kTokens; i += 1024) bench::do_not_optimize_away(tokens[i]);

  const at::Tensor indices = random_indices(own.size());
  std::vector<uint16_t> narrow_buffer(kBatchSize * kLength);
  std::vector<int64_t> wide_buffer(kBatchSize * kLength);
  const auto load = [&](const TokenDataset& dataset) {
    for (int64_t i = 0; i < kBatches; ++i) {
      bench::do_not_optimize_away(dataset.get_batch(indices[i], {})["tokens"].numel());
    }
  };
  const auto with_memcpy = [&] {
    for_each_window(tokens, indices, [&](const uint16_t* window, int64_t place) {
      std::memcpy(narrow_buffer.data() + place, window, kLength * sizeof(uint16_t));
    });
  };
  const auto with_loop = [&] {
    for_each_window(tokens, indices, [&](const uint16_t* window, int64_t place) {
      for (int64_t i = 0; i < kLength; ++i) wide_buffer[static_cast<size_t>(place + i)] = window[i];
    });
  };
  constexpr double kBatchBytes = kBatchSize * kLength * sizeof(uint16_t);  // bytes read
  const auto timings = bench::side_by_side("batch", kBatches,
                                           {{"memcpy", with_memcpy, kBatchBytes},
                                            {"TokenDataset, 16 bits as in the file", [&] { load(own); }, kBatchBytes},
                                            {"loop that widens to 64 bits", with_loop, kBatchBytes},
                                            {"TokenDataset, 64 bits", [&] { load(wide); }, kBatchBytes}},
                                           /*rounds=*/15);
  fmt::print(
      "speed over memcpy: {:.2f} with 16 bits (at least 0.9), {:.2f} with 64, which writes four times the bytes\n",
      1 / timings[1].ratio, 1 / timings[3].ratio);
  fmt::print("speed over the loop: {:.2f} with 64 bits\n", timings[2].ratio / timings[3].ratio);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  std::string folder = (fs::temp_directory_path() / "fulgur-token-loader-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp");
  const fs::path file = fs::path(folder) / "random.tokens";
  write_tokens(file);
  compare(file);
  fs::remove_all(folder);
}
