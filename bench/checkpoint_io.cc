// Writing a checkpoint against writing the same bytes to one file, both synced; reading its weights into a module
// against torch::load(). All in the page cache, in a temporary folder (TMPDIR chooses the disk), which takes 10 GB.
//   OMP_NUM_THREADS=1 ./bazelw run //bench:checkpoint_io
// On a disk whose bandwidth is shared the times scatter; run it several times.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "bench/side_by_side.h"
#include "fulgur/checkpoint/atomic_files.h"
#include "fulgur/checkpoint/checkpoint_writer.h"
#include "fulgur/checkpoint/file_system.h"
#include "fulgur/checkpoint/formats/safetensors.h"
#include "fulgur/checkpoint/manifest.h"
#include "fulgur/core/module_state.h"
#include "fulgur/distributed/local_collective.h"
#include "fulgur/loops/checkpoint_saver.h"

namespace {

using namespace fulgur;
namespace fs = std::filesystem;

constexpr int kRounds = 7;

// 33.5 M parameters, 134 MB, in blocks like those of a small transformer.
struct Weights : torch::nn::Module {
  Weights() {
    for (int block = 0; block < 10; ++block) {
      for (const auto& [name, rows] :
           {std::pair{"query", 512}, {"key", 512}, {"value", 512}, {"out", 512}, {"up", 2048}, {"down", 2048}}) {
        register_parameter(fmt::format("{}_{}", name, block), torch::randn({rows, 512}));
        register_parameter(fmt::format("{}_bias_{}", name, block), torch::randn({rows}));
      }
    }
    register_parameter("embedding", torch::randn({3900, 512}));
  }
};

// Adam's two moments of each weight.
NamedTensors adam_state(const NamedTensors& weights) {
  NamedTensors state;
  for (const auto& [name, weight] : weights) {
    for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
      state.emplace_back(fmt::format("{}/{}", name, moment), torch::randn_like(weight));
    }
  }
  return state;
}

int64_t bytes_of(const NamedTensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const auto& named) {
    return sum + static_cast<int64_t>(named.second.nbytes());
  });
}

void check(bool succeeded, const char* what) {
  if (!succeeded) throw std::runtime_error(what);
}

void write_raw(const fs::path& path, const std::vector<NamedTensors>& files) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0644);
  for (const NamedTensors& tensors : files) {
    for (const auto& [name, tensor] : tensors) {
      check(::write(file, tensor.const_data_ptr(), tensor.nbytes()) == static_cast<ssize_t>(tensor.nbytes()), "write");
    }
  }
  check(::fsync(file) == 0, "fsync");
  ::close(file);
}

void write_checkpoint(const fs::path& folder, const std::vector<NamedTensors>& files) {
  TemporaryFolder temporary(folder);
  Manifest manifest;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = fmt::format("{}.safetensors", i);
    FileWriter file(temporary.path() / name);
    write_safetensors(file, files[i]);
    const FileDigest digest = file.sync_and_close();
    manifest.files.push_back({name, digest.num_bytes, digest.xxh3});
  }
  write_manifest(temporary.path(), manifest);
  temporary.commit();
}

void compare_writing(const fs::path& folder, const std::string& title, const std::vector<NamedTensors>& files) {
  int64_t num_bytes = 0;
  for (const NamedTensors& tensors : files) num_bytes += bytes_of(tensors);
  fmt::print("\nwriting {}: {:.0f} MB\n", title, static_cast<double>(num_bytes) / 1e6);
  int count = 0;
  const auto timings = bench::side_by_side(
      "MB", static_cast<double>(num_bytes) / 1e6,
      {{"one file, raw", [&] { write_raw(folder / fmt::format("raw-{}", ++count), files); }},
       {"checkpoint", [&] { write_checkpoint(folder / fmt::format("checkpoint-{}", ++count), files); }}},
      kRounds);
  fmt::print("speed of the checkpoint over raw: {:.2f} (at least 0.9)\n", 1 / timings[1].ratio);
  for (const auto& entry : fs::directory_iterator(folder)) fs::remove_all(entry.path());
}

void copy_into(Weights& module, const SafetensorsFile& file) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : named_state(module)) tensor.copy_(file.tensor(name));
}

// Reads one byte of each page: the cost of a view of the file that is read later, or in part.
int64_t touch_pages(const SafetensorsFile& file) {
  constexpr int64_t kPageBytes = 4096;
  int64_t sum = 0;
  for (const SafetensorsEntry& entry : file.entries()) {
    const at::Tensor tensor = file.tensor(entry.name);
    const char* bytes = static_cast<const char*>(tensor.const_data_ptr());
    for (int64_t i = 0; i < entry.end - entry.begin; i += kPageBytes) sum += bytes[i];
  }
  return sum;
}

// torch::load() allocates new tensors; the module's own are allocated already. A program loads once, into memory that
// is new to the process, so freed memory is not kept for the next round here.
void compare_reading(const fs::path& folder) {
  ::mallopt(M_MMAP_THRESHOLD, 128 << 10);
  const auto module = std::make_shared<Weights>();
  const NamedTensors weights = named_state(*module);
  torch::save(module, (folder / "weights.pt").string());
  const fs::path path = folder / "weights.safetensors";
  const FileDigest digest = write_safetensors(path, weights);
  auto loaded = std::make_shared<Weights>();
  fmt::print("\nreading into a module: {:.0f} MB\n", static_cast<double>(bytes_of(weights)) / 1e6);
  const auto timings = bench::side_by_side(
      "MB", static_cast<double>(bytes_of(weights)) / 1e6,
      {{"torch::load", [&] { torch::load(loaded, (folder / "weights.pt").string()); }},
       {"mapped, copied", [&] { copy_into(*loaded, SafetensorsFile(path)); }},
       {"hash checked, mapped, copied",
        [&] {
          check(digest_of(path) == digest, "digest");
          copy_into(*loaded, SafetensorsFile(path));
        }},
       {"mapped, pages touched", [&] { bench::do_not_optimize_away(touch_pages(SafetensorsFile(path))); }}},
      kRounds);
  fmt::print("speed over torch::load: {:.1f} copied (at least 2), {:.1f} with the hash, {:.1f} touched\n",
             1 / timings[1].ratio, 1 / timings[2].ratio, 1 / timings[3].ratio);
}

// What saving in the background costs the training: the copy, but not the writing of files. The writing thread
// finishes between two rounds.
void compare_stall(const fs::path& folder, const std::vector<NamedTensors>& files) {
  CheckpointContent content{.weights = files.front()};
  for (size_t i = 0; i < content.weights.size(); ++i) {
    const auto& [name, weight] = content.weights[i];
    const auto& [exp_avg, exp_avg_sq] = std::pair(files.back()[2 * i].second, files.back()[2 * i + 1].second);
    content.ranges.push_back(
        {name, 0, weight.numel(), {{"exp_avg", exp_avg.flatten()}, {"exp_avg_sq", exp_avg_sq.flatten()}}});
  }
  LocalCollective alone;
  const auto with_content = [&](bool, const auto& use) {
    CheckpointContent now = content;
    use(now);
  };
  CheckpointSaver saver(alone, with_content, [](const fs::path&, const SaveOptions&) {});
  int64_t num_bytes = 0;
  for (const NamedTensors& tensors : files) num_bytes += bytes_of(tensors);
  fmt::print("\nsaving beside the training: {:.0f} MB\n", static_cast<double>(num_bytes) / 1e6);
  const auto copy = [&] {
    std::vector<at::Tensor> copies;
    for (const NamedTensors& tensors : files) {
      for (const auto& [name, tensor] : tensors) {
        copies.push_back(torch::empty_like(tensor));
        std::memcpy(copies.back().mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
      }
    }
  };
  const auto seconds = [](const auto& run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<double> ratios;
  for (int round = 0; round <= kRounds; ++round) {
    const double memcpy_s = seconds(copy);
    const double stall_s =
        seconds([&] { saver.save(folder / fmt::format("beside-{}", round), {.async = true, .links = {}}); });
    const double whole_s = stall_s + seconds([&] { saver.finish(); });
    fmt::print("memcpy {:.3f} s, stall {:.3f} s, until it is on the disk {:.3f} s\n", memcpy_s, stall_s, whole_s);
    if (round > 0) ratios.push_back(stall_s / memcpy_s);
  }
  std::ranges::nth_element(ratios, ratios.begin() + kRounds / 2);
  fmt::print("stall over memcpy into new memory: {:.2f} (at most 1.2)\n", ratios[kRounds / 2]);
  for (const auto& entry : fs::directory_iterator(folder)) fs::remove_all(entry.path());
}

}  // namespace

int main() {
  at::set_num_threads(1);
  std::string folder = (fs::temp_directory_path() / "fulgur-checkpoint-io-XXXXXX").string();
  check(::mkdtemp(folder.data()) != nullptr, "mkdtemp");
  const Weights module;
  const NamedTensors weights = named_state(module);
  compare_writing(folder, "weights", {weights});
  compare_writing(folder, "weights and the state of Adam", {weights, adam_state(weights)});
  compare_reading(folder);
  compare_stall(folder, {weights, adam_state(weights)});
  fs::remove_all(folder);
}
