// The step of one model on a GPU, or on a CPU where there is none:
//   gpu_step --model=gpt2 --precision=bf16-mixed --gradient_clip_val=1
// Models: gpt2, GPT-2 with 124 M parameters (Radford et al. 2019), whose sizes are options; mlp, the one of
// bench/trainer_step, whose step takes no time but the host's. Each rank prints, in one line, the milliseconds of a
// step (the median of `repeats` times `steps` steps, each time until the device has done them), the bytes of the device
// at their peak and between two steps, and a digest of the trained weights: equal digests are equal bits. Each rank has
// other batches. With tools/gpu_calls.cc preloaded, a second line has what a timed step asks of the GPU outside of
// forward and backward.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "fulgur.h"

namespace {

using namespace fulgur;
namespace nn = torch::nn;
namespace F = torch::nn::functional;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPool = 8;  // different batches

struct Options {
  TrainerOptions trainer{.devices = 1, .max_epochs = 1, .barebones = true};
  std::string model = "gpt2";
  int64_t n_layer = 12, n_head = 12, n_embd = 768, context = 1024, vocab_size = 50304;
  int64_t batch_size = 8;
  int64_t steps = 10, repeats = 5, warm_up = 5;
  int64_t throws_at = -1, throws_on = 0;

  void describe(FieldVisitor& visit) {
    trainer.describe(visit);
    visit({.name = "model", .help = "what is trained", .choices = {"gpt2", "mlp"}}, &model);
    visit({.name = "n_layer", .help = "number of blocks", .min = 1}, &n_layer);
    visit({.name = "n_head", .help = "attention heads per block; divides n_embd", .min = 1}, &n_head);
    visit({.name = "n_embd", .help = "width of a token's vector", .min = 1}, &n_embd);
    visit({.name = "context", .help = "tokens per sample", .min = 1}, &context);
    visit({.name = "vocab_size", .help = "number of different tokens", .min = 2}, &vocab_size);
    visit({.name = "batch_size", .help = "samples per step", .min = 1}, &batch_size);
    visit({.name = "steps", .help = "steps that are timed together", .min = 1}, &steps);
    visit({.name = "repeats", .help = "times that they are timed", .min = 1}, &repeats);
    visit({.name = "warm_up", .help = "steps before", .min = 1}, &warm_up);
    visit({.name = "throws_at", .help = "step in which a rank fails; negative: none does"}, &throws_at);
    visit({.name = "throws_on", .help = "rank that fails", .min = 0}, &throws_on);
  }
};

struct BlockImpl : nn::Module {
  int64_t n_head;
  nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  nn::Linear qkv{nullptr}, mix{nullptr}, expand{nullptr}, contract{nullptr};

  explicit BlockImpl(const Options& options) : n_head(options.n_head) {
    const int64_t width = options.n_embd;
    attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    mix = register_module("mix", nn::Linear(width, width));
    mlp_norm = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    expand = register_module("expand", nn::Linear(width, 4 * width));
    contract = register_module("contract", nn::Linear(4 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) {  // x and the result: [batch_size, context, n_embd]
    const auto heads =
        linear(qkv, attention_norm->forward(x)).unflatten(2, {3, n_head, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], /*attn_mask=*/{},
                                                              /*dropout_p=*/0.0, /*is_causal=*/true);
    const at::Tensor attended = x + linear(mix, mixed.transpose(1, 2).flatten(2));
    return attended + linear(contract, F::gelu(linear(expand, mlp_norm->forward(attended))));
  }

  // torch::nn::Linear's own forward adds the bias by a kernel of its own where x has three dimensions, which takes 11%
  // of a step in bf16-mixed. The Linear of Python, which this is compared with, leaves it to the product.
  static at::Tensor linear(const nn::Linear& layer, const at::Tensor& x) {
    return at::linear(x, layer->weight, layer->bias);
  }
};
TORCH_MODULE(Block);

// Launches, copies, waits and allocations.
using Calls = std::array<int64_t, 4>;

// What the process has asked of the GPU so far; zeros unless tools/gpu_calls.cc is preloaded.
Calls calls_so_far() {
  static auto* const read = reinterpret_cast<void (*)(int64_t*)>(dlsym(RTLD_DEFAULT, "fulgur_gpu_calls"));
  Calls calls{};
  if (read != nullptr) read(calls.data());
  return calls;
}

// Bytes of the first GPU that are allocated; 0 without a GPU.
c10::CachingAllocator::Stat allocated_bytes() {
  if (!torch::cuda::is_available()) return {};
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(0).allocated_bytes[kAll];
}

// Times steps, and lets the derived class say what they are.
class Timed : public Module {
 public:
  explicit Timed(const Options& options) : options_(options) {}

  BatchAction on_train_batch_start(const Batch&, int64_t batch_idx) override {
    if (batch_idx == options_.warm_up) beside_ = {};
    count_beside();
    return BatchAction::run;
  }
  void optimizer_step(Optimizer&, const std::function<void()>& step) override {
    seen_ = calls_so_far();
    step();
  }
  void on_before_zero_grad() override {
    if (run_state().global_step == options_.throws_at && global_rank() == options_.throws_on) {
      throw std::runtime_error("as the flags ask for");
    }
  }
  void on_train_batch_end(const at::Tensor& loss, const Batch&, int64_t batch_idx) override {
    const int64_t timed = batch_idx + 1 - options_.warm_up;
    if (timed < 0 || timed % options_.steps != 0) return;
    count_beside();
    loss.item();  // waits for the device
    bytes_between_steps_ = allocated_bytes().current;
    seen_ = calls_so_far();
    const auto now = Clock::now();
    if (timed > 0) times_ms_.push_back(std::chrono::duration<double, std::milli>(now - start_).count());
    start_ = now;
  }
  Optimizers configure_optimizers() override {
    return optim::AdamW(parameters(), {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1});
  }
  double step_ms() {
    std::ranges::sort(times_ms_);
    return times_ms_.at(times_ms_.size() / 2) / static_cast<double>(options_.steps);
  }

  int64_t bytes_between_steps() const { return bytes_between_steps_; }

  // What the timed steps have asked of the GPU outside of forward and backward, in all.
  const Calls& beside() const { return beside_; }

 protected:
  const Options options_;

 private:
  void count_beside() {
    const Calls now = calls_so_far();
    for (size_t i = 0; i < now.size(); ++i) beside_[i] += now[i] - seen_[i];
  }

  Clock::time_point start_;
  std::vector<double> times_ms_{};
  int64_t bytes_between_steps_ = 0;
  Calls seen_{}, beside_{};  // `seen_`: before the last update, or after waiting for the time
};

class Gpt2 final : public Timed {
 public:
  explicit Gpt2(const Options& options) : Timed(options) {
    tokens_ = register_module("tokens", nn::Embedding(options.vocab_size, options.n_embd));
    positions_ = register_module("positions", nn::Embedding(options.context, options.n_embd));
    blocks_ = register_module("blocks", nn::Sequential());
    for (int64_t i = 0; i < options.n_layer; ++i) blocks_->push_back(Block(options));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.n_embd})));
    const at::NoGradGuard no_grad;
    for (const at::Tensor& param : parameters()) {
      if (param.dim() > 1) param.normal_(0.0, 0.02);
    }
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const at::Tensor text = batch["tokens"];  // [batch_size, context + 1]
    const at::Tensor x = tokens_->forward(text.slice(1, 0, -1)) + positions_->weight;
    const at::Tensor logits = F::linear(norm_->forward(blocks_->forward(x)), tokens_->weight);
    return F::cross_entropy(logits.flatten(0, 1), text.slice(1, 1).flatten());
  }

 private:
  nn::Embedding tokens_{nullptr}, positions_{nullptr};
  nn::Sequential blocks_{nullptr};
  nn::LayerNorm norm_{nullptr};
};

class Mlp final : public Timed {
 public:
  explicit Mlp(const Options& options) : Timed(options) {
    using nn::Linear, nn::ReLU;
    layers_ = register_module("layers", nn::Sequential(Linear(32, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 64),
                                                       ReLU(), Linear(64, 2)));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return F::cross_entropy(layers_->forward(batch["x"]), batch["y"]);
  }

 private:
  nn::Sequential layers_{nullptr};
};

// Batches that were made before, as often as they are asked for.
class Pool final : public Loader {
 public:
  Pool(const Options& options, int64_t num_batches) : options_(options), num_batches_(num_batches) { fill(0); }

  void begin_epoch(int64_t) override { next_ = 0; }
  std::optional<Batch> next() override {
    if (next_ == num_batches_) return std::nullopt;
    return pool_[static_cast<size_t>(next_++ % kPool)];
  }
  std::optional<int64_t> num_batches() const override { return num_batches_; }
  bool set_shard(const DataShard& shard) override {
    fill(shard.rank);
    return true;
  }

 private:
  void fill(int64_t rank) {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank));
    const int64_t size = options_.batch_size;
    pool_.clear();
    for (int64_t i = 0; i < kPool; ++i) {
      if (options_.model == "mlp") {
        pool_.push_back({{"x", torch::randn({size, 32}, random)}, {"y", torch::randint(0, 2, {size}, random)}});
      } else {
        const std::vector<int64_t> sizes{size, options_.context + 1};
        pool_.push_back({{"tokens", torch::randint(0, options_.vocab_size, sizes, random)}});
      }
    }
  }

  const Options options_;
  std::vector<Batch> pool_{};
  int64_t num_batches_, next_ = 0;
};

uint64_t digest(const torch::nn::Module& module) {
  uint64_t digest = 0;
  for (const at::Tensor& param : module.parameters()) {
    const at::Tensor values = param.detach().cpu().contiguous();
    digest = XXH3_64bits_withSeed(values.const_data_ptr(), values.nbytes(), digest);
  }
  return digest;
}

template <class Net>
void train(const Options& options) {
  seed_everything(1);
  const auto module = make_module<Net>(options);
  const int64_t num_batches = options.warm_up + options.steps * options.repeats;
  Trainer trainer(options.trainer);
  trainer.fit(module, {.train = std::make_shared<Pool>(options, num_batches)});
  fmt::print("{:.4f} ms, {} bytes at the peak, {} between steps, weights {:016x}\n", module->step_ms(),
             allocated_bytes().peak, module->bytes_between_steps(), digest(*module));
  if (calls_so_far() == Calls{}) return;
  std::vector<double> of_step;
  for (const int64_t calls : module->beside()) {
    of_step.push_back(static_cast<double>(calls) / static_cast<double>(options.steps * options.repeats));
  }
  fmt::print("beside forward and backward: {:.2f} launches, {:.2f} copies, {:.2f} waits, {:.2f} allocations a step\n",
             of_step[0], of_step[1], of_step[2], of_step[3]);
}

void run(Options options) { options.model == "mlp" ? train<Mlp>(options) : train<Gpt2>(options); }

}  // namespace

int main(int argc, char** argv) { return run_command_line(argc, argv, run); }
