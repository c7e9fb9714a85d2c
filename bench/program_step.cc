// Forward and backward of a model that was written in C++, beside the same model exported by Python. Started by
// bench/python_program.py, which exports them:
//   OMP_NUM_THREADS=1 bazel-bin/bench/program_step mlp|gpt|vit <program.pt2> [rounds]
// There is no ViT in C++: "vit" times the exported program alone. "load <program.pt2>" prints how long loading takes,
// with every weight read, beside plain reads of the file.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/side_by_side.h"
#include "fulgur/core/batch.h"
#include "fulgur/programs/program.h"

namespace {

using namespace fulgur;
namespace F = torch::nn::functional;

struct Mlp : torch::nn::Module {
  torch::nn::Sequential layers{nullptr};
  Mlp() {
    using namespace torch::nn;
    layers = register_module(
        "layers", Sequential(Linear(32, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 2)));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
};

constexpr int64_t kVocabulary = 256, kWidth = 128, kLayers = 4, kHeads = 4, kContext = 64;

struct Block : torch::nn::Module {
  torch::nn::LayerNorm before_attention{nullptr}, before_mlp{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  Block() {
    const auto norm = [&](const char* name) {
      return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    };
    before_attention = norm("before_attention");
    before_mlp = norm("before_mlp");
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto parts = qkv->forward(before_attention->forward(x))
                           .view({batch, length, 3, kHeads, kWidth / kHeads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0.0, /*is_causal=*/true);
    x = x + out->forward(mixed.transpose(1, 2).reshape({batch, length, kWidth}));
    return x + down->forward(at::gelu(up->forward(before_mlp->forward(x))));
  }
};

struct Gpt : torch::nn::Module {
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
  Gpt() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kContext, kWidth));
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module(fmt::format("block_{}", i), std::make_shared<Block>()));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tokens->forward(ids) + positions->forward(torch::arange(ids.size(1)));
    for (const auto& block : blocks) x = block->forward(x);
    return head->forward(norm->forward(x));
  }
};

// A step on one batch: forward, loss, backward.
std::function<void()> steps_of(const std::function<at::Tensor(const at::Tensor&)>& forward,
                               const std::shared_ptr<torch::nn::Module>& module, const at::Tensor& input,
                               const at::Tensor& target, int num_steps) {
  return [=] {
    for (int i = 0; i < num_steps; ++i) {
      module->zero_grad();
      F::cross_entropy(forward(input).flatten(0, -2), target.flatten()).backward();
    }
  };
}

template <class ByHand>
void compare(const std::string& file, const at::Tensor& input, const at::Tensor& target, int num_steps, int rounds) {
  const auto by_hand = std::make_shared<ByHand>();
  const std::shared_ptr<nn::ProgramImpl> program = nn::Program(file).ptr();
  const auto hand = [by_hand](const at::Tensor& x) { return by_hand->forward(x); };
  const auto imported = [program](const at::Tensor& x) { return program->forward(x); };
  bench::side_by_side("step", num_steps,
                      {{"written in C++", steps_of(hand, by_hand, input, target, num_steps)},
                       {"exported program", steps_of(imported, program, input, target, num_steps)}},
                      rounds);
}

constexpr size_t kBufferBytes = size_t{1} << 22;

// Reads the file into memory of its own, as a loader does that keeps the weights.
void read_into_memory(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  const auto num_bytes = std::filesystem::file_size(file);
  const auto memory = std::make_unique_for_overwrite<char[]>(num_bytes);
  stream.read(memory.get(), static_cast<std::streamsize>(num_bytes));
}

// Reads the file piece by piece, and keeps nothing.
void read_through_buffer(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::vector<char> buffer(kBufferBytes);
  while (stream.read(buffer.data(), static_cast<std::streamsize>(buffer.size()))) {
  }
}

// Loads the program and copies each weight to a buffer.
void load_and_read(const std::string& file) {
  std::vector<char> buffer(kBufferBytes);
  for (const at::Tensor& weight : nn::Program(file)->parameters()) {
    const char* data = static_cast<const char*>(weight.const_data_ptr());
    for (size_t i = 0; i < weight.nbytes(); i += kBufferBytes) {
      std::memcpy(buffer.data(), data + i, std::min(kBufferBytes, weight.nbytes() - i));
    }
  }
}

void load(const std::string& file) {
  bench::side_by_side("load", 1,
                      {{"read into memory", [&] { read_into_memory(file); }},
                       {"read through a buffer", [&] { read_through_buffer(file); }},
                       {"nn::Program, every byte read", [&] { load_and_read(file); }}});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  at::set_num_threads(1);
  torch::manual_seed(0);
  if (command == "mlp") {
    compare<Mlp>(argv[2], torch::randn({32, 32}), torch::randint(0, 2, {32}), 1000, rounds);
  } else if (command == "gpt") {
    const at::Tensor ids = torch::randint(0, kVocabulary, {16, kContext});
    compare<Gpt>(argv[2], ids, ids, 5, rounds);
  } else if (command == "vit") {
    const std::shared_ptr<nn::ProgramImpl> program = nn::Program(argv[2]).ptr();
    const auto imported = [program](const at::Tensor& x) { return program->forward(x); };
    const at::Tensor pictures = torch::randn({4, 3, 224, 224}), classes = torch::randint(0, 10, {4});
    bench::side_by_side("step", 1, {{"exported program", steps_of(imported, program, pictures, classes, 1)}}, rounds);
  } else if (command == "load") {
    load(argv[2]);
  } else {
    return 2;
  }
}
