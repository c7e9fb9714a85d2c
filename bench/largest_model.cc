// Trains a GPT with --n_layer layers for a few steps on a GPU, for bench/largest_model.py, which searches for the
// most layers that fit:
//   largest_model --n_layer=40 --strategy=zero_offload --precision=bf16-true
// Prints parameters, seconds per step, TFLOPS (6 per parameter and token; recomputation is not counted) and the
// device's peak bytes. Without a GPU it prints that there is none.
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <chrono>

#include "fulgur.h"

namespace {

using namespace fulgur;
using Clock = std::chrono::steady_clock;

constexpr int64_t kVocabSize = 256;
constexpr int64_t kHeadSize = 64;
constexpr int64_t kWarmUp = 2;  // steps that are not timed

struct Options {
  TrainerOptions trainer{.accelerator = "cuda", .devices = 1, .max_epochs = 1, .barebones = true};
  int64_t n_layer = 4;
  int64_t n_embd = 2048;
  int64_t context = 256;
  int64_t batch_size = 4;
  int64_t steps = 4;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "n_layer", .help = "number of blocks, each with 12 n_embd^2 parameters", .min = 1}, &n_layer);
    visit({.name = "n_embd", .help = "width of a token's vector; a multiple of 64", .min = kHeadSize}, &n_embd);
    visit({.name = "context", .help = "tokens per sample", .min = 1}, &context);
    visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
    visit({.name = "steps", .help = "number of timed steps", .min = 1}, &steps);
  }
};

struct Block {
  at::Tensor qkv, mix, expand, contract;

  at::Tensor operator()(const at::Tensor& x) const {  // x and the result: [batch_size, context, n_embd]
    const auto norm = [](const at::Tensor& values) { return at::layer_norm(values, values.sizes().slice(2)); };
    const auto heads = at::linear(norm(x), qkv).unflatten(2, {3, -1, kHeadSize}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], /*attn_mask=*/{},
                                                              /*dropout_p=*/0.0, /*is_causal=*/true);
    const at::Tensor attended = x + at::linear(mixed.transpose(1, 2).flatten(2), mix);
    return attended + at::linear(at::gelu(at::linear(norm(attended), expand)), contract);
  }
};

class Gpt : public Module {
 public:
  explicit Gpt(const Options& options) : options_(options) {
    const int64_t width = options.n_embd;
    tokens_ = make("tokens", {kVocabSize, width});
    positions_ = make("positions", {options.context, width});
    for (int64_t i = 0; i < options.n_layer; ++i) {
      const auto name = [&](const char* part) { return fmt::format("{}_{}", part, i); };
      blocks_.push_back({make(name("qkv"), {3 * width, width}), make(name("mix"), {width, width}),
                         make(name("expand"), {4 * width, width}), make(name("contract"), {width, 4 * width})});
    }
    for (const at::Tensor& param : parameters()) num_params_ += param.numel();
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor text = batch["tokens"];  // [batch_size, context + 1]
    at::Tensor x = at::embedding(tokens_, text.slice(1, 0, -1)) + positions_;
    for (const Block& block : blocks_) x = checkpoint(block, x);
    const at::Tensor logits = at::linear(x, tokens_).to(at::kFloat);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), text.slice(1, 1).flatten());
  }
  void on_train_batch_end(const at::Tensor& loss, const Batch&, int64_t batch_idx) override {
    if (batch_idx + 1 < kWarmUp) return;
    loss.item();  // waits for the device
    batch_idx + 1 == kWarmUp ? void(start_ = Clock::now()) : void(end_ = Clock::now());
  }
  void on_train_end() override {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(0);
    peak_bytes_ = stats.allocated_bytes[kAll].peak;
  }
  Optimizers configure_optimizers() override { return optim::AdamW(parameters(), {.lr = 1e-4}); }

  void print() const {
    const double step_s = std::chrono::duration<double>(end_ - start_).count() / static_cast<double>(options_.steps);
    const double num_tokens = static_cast<double>(options_.batch_size * options_.context);
    fmt::print("{} {:.4f} {:.2f} {}\n", num_params_, step_s,
               6e-12 * static_cast<double>(num_params_) * num_tokens / step_s, peak_bytes_);
  }

 private:
  // All rows are the same: random numbers for billions of weights would take minutes.
  at::Tensor make(const std::string& name, std::vector<int64_t> sizes) {
    const at::Tensor weight = torch::empty(sizes);
    weight.copy_(torch::randn({sizes.back()}) * 0.02);
    return register_parameter(name, weight);
  }

  Options options_;
  at::Tensor tokens_, positions_;
  std::vector<Block> blocks_;
  int64_t num_params_ = 0, peak_bytes_ = 0;
  Clock::time_point start_, end_;
};

void run(Options options) {
  if (!torch::cuda::is_available()) {
    fmt::print("there is no GPU here, so no model is looked for\n");
    return;
  }
  const auto module = make_module<Gpt>(options);
  const int64_t num_samples = options.batch_size * (options.steps + kWarmUp);
  const auto dataset =
      TensorDataset::make({{"tokens", torch::randint(kVocabSize, {num_samples, options.context + 1})}});
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = DataLoader::make(dataset, {.batch_size = options.batch_size})});
  module->print();
}

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
