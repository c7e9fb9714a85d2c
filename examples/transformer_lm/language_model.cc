#include "examples/transformer_lm/language_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

namespace transformer_lm {
namespace {

using namespace fulgur;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kVocabSize = 256;  // one token per byte
constexpr double kMinLrRatio = 0.1;
constexpr double kInitStd = 0.02;

void check(const SampleOptions& options) {
  check_fields("sample", options);
  if (options.prompt.empty()) throw UsageError("sample.prompt must have at least one character");
}

void set_dimensions(LanguageModelOptions& options) {
  const bool is_gpt2_small = options.size == "article";
  options.n_layer = options.n_layer.value_or(is_gpt2_small ? 12 : 4);
  options.n_head = options.n_head.value_or(is_gpt2_small ? 12 : 4);
  options.n_embd = options.n_embd.value_or(is_gpt2_small ? 768 : 128);
  options.context = options.context.value_or(is_gpt2_small ? 1024 : 64);
}

LanguageModelOptions checked(LanguageModelOptions options) {
  check_fields("LanguageModel", options);
  check(options.sample);
  set_dimensions(options);
  if (*options.n_embd % *options.n_head == 0) return options;
  throw UsageError(fmt::format("n_embd ({}) must be a multiple of n_head ({})", *options.n_embd, *options.n_head));
}

class CausalAttentionImpl : public nn::Module {
 public:
  explicit CausalAttentionImpl(const LanguageModelOptions& options)
      : n_head_(*options.n_head), dropout_(options.dropout) {
    const int64_t width = *options.n_embd;
    qkv_ = register_module("qkv", nn::Linear(width, 3 * width));
    project_ = register_module("project", nn::Linear(width, width));
  }

  at::Tensor forward(const at::Tensor& x) {  // x and the result: [batch_size, length, n_embd]
    const auto qkv = qkv_->forward(x).unflatten(2, {3, n_head_, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                        is_training() ? dropout_ : 0.0, /*is_causal=*/true);
    return project_->forward(mixed.transpose(1, 2).flatten(2));
  }

 private:
  int64_t n_head_;
  double dropout_;
  nn::Linear qkv_{nullptr}, project_{nullptr};
};
TORCH_MODULE(CausalAttention);

class BlockImpl : public nn::Module {
 public:
  explicit BlockImpl(const LanguageModelOptions& options) {
    const int64_t width = *options.n_embd;
    attention_norm_ = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    attention_ = register_module("attention", CausalAttention(options));
    mlp_norm_ = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    mlp_ = register_module("mlp", nn::Sequential({{"expand", nn::Linear(width, 4 * width)},
                                                  {"gelu", nn::GELU()},
                                                  {"project", nn::Linear(4 * width, width)}}));
    dropout_ = register_module("dropout", nn::Dropout(options.dropout));
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto attended = x + dropout_->forward(attention_->forward(attention_norm_->forward(x)));
    return attended + dropout_->forward(mlp_->forward(mlp_norm_->forward(attended)));
  }

 private:
  nn::LayerNorm attention_norm_{nullptr}, mlp_norm_{nullptr};
  CausalAttention attention_{nullptr};
  nn::Sequential mlp_{nullptr};
  nn::Dropout dropout_{nullptr};
};
TORCH_MODULE(Block);

at::Tensor bits_per_character(LanguageModel& model, const Batch& batch) {
  const auto tokens = batch["tokens"].to(at::kLong);
  const auto logits = model.forward(tokens.slice(1, 0, -1));
  return F::cross_entropy(logits.flatten(0, 1), tokens.slice(1, 1).flatten()) / std::numbers::ln2;
}

at::Tensor next_token(const at::Tensor& logits, double temperature, const at::Generator& generator) {  // int64 [1]
  if (temperature == 0) return logits.argmax(-1, /*keepdim=*/true);
  return at::multinomial((logits / temperature).softmax(-1).cpu(), 1, /*replacement=*/false, generator);
}

}  // namespace

void LanguageModelOptions::describe(FieldVisitor& visit) {
  visit({.name = "size",
         .help = "which dimensions a model has that are not given: for two cores, or GPT-2 small's",
         .choices = {"default", "article"}},
        &size);
  visit({.name = "n_layer", .help = "number of blocks", .min = 1}, &n_layer);
  visit({.name = "n_head", .help = "attention heads per block", .min = 1}, &n_head);
  visit({.name = "n_embd", .help = "width of a token's vector; a multiple of n_head", .min = 1}, &n_embd);
  visit({.name = "context", .help = "characters that the model looks back on", .min = 1}, &context);
  visit({.name = "dropout", .help = "fraction of values that are dropped in training", .min = 0, .max = 1}, &dropout);
  visit({.name = "lr", .help = "learning rate at its peak", .min = 0}, &lr);
  visit({.name = "warmup", .help = "fraction of all steps in which the learning rate rises", .min = 0, .max = 1},
        &warmup);
  visit({.name = "weight_decay", .help = "weight decay of matrices; biases and norms have none", .min = 0},
        &weight_decay);
  visit({.name = "sample", .help = "what is written after training"}, &sample);
}

void link_options(LanguageModelOptions& model, TextDataOptions& data) {
  set_dimensions(model);
  data.context = *model.context;
}

LanguageModel::LanguageModel(Options options) : options_(checked(options)) {
  save_hyper_parameters(options_);
  const int64_t width = *options_.n_embd;
  token_embedding_ = register_module("token_embedding", nn::Embedding(kVocabSize, width));
  position_embedding_ = register_module("position_embedding", nn::Embedding(*options_.context, width));
  dropout_ = register_module("dropout", nn::Dropout(options_.dropout));
  blocks_ = register_module("blocks", nn::Sequential());
  for (int64_t i = 0; i < *options_.n_layer; ++i) blocks_->push_back(Block(options_));
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  head_ = register_module("head", nn::Linear(nn::LinearOptions(width, kVocabSize).bias(false)));
  tie_parameter(*head_, "weight", head_->weight, token_embedding_->weight);
  initialize();
}

// GPT-2's initial weights: what is added to the residual stream starts smaller, the more blocks there are.
void LanguageModel::initialize() {
  const at::NoGradGuard no_grad;
  const double residual_std = kInitStd / std::sqrt(2.0 * static_cast<double>(*options_.n_layer));
  for (const auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    if (name.ends_with("bias")) parameter.value().zero_();
    if (parameter.value().dim() < 2 || name == "head.weight") continue;  // the head shares the embedding's weight
    parameter.value().normal_(0.0, name.ends_with("project.weight") ? residual_std : kInitStd);
  }
}

at::Tensor LanguageModel::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  TORCH_CHECK_VALUE(length <= *options_.context, "tokens are ", length,
                    " characters long, but the model looks back on ", *options_.context,
                    "; crop them, or train with a larger --model.context");
  const auto positions = at::arange(length, tokens.options());
  const auto x = token_embedding_->forward(tokens) + position_embedding_->forward(positions);
  return head_->forward(norm_->forward(blocks_->forward(dropout_->forward(x))));
}

at::Tensor LanguageModel::training_step(const Batch& batch, int64_t) {
  const auto bpc = bits_per_character(*this, batch);
  log("train_bpc", bpc, {.prog_bar = true});
  return bpc * std::numbers::ln2;  // nats, as is usual for a loss
}

void LanguageModel::validation_step(const Batch& batch, int64_t) {
  log("val_bpc", bits_per_character(*this, batch), {.prog_bar = true});
}

Optimizers LanguageModel::configure_optimizers() { return optimizers_of(*this, options_); }

Optimizers optimizers_of(const Module& module, const LanguageModelOptions& options) {
  const int64_t total_steps = module.estimated_stepping_batches();
  const auto warmup_steps = static_cast<int64_t>(options.warmup * static_cast<double>(total_steps));

  ParamGroup matrices{.weight_decay = options.weight_decay}, others{.weight_decay = 0.0};
  for (const at::Tensor& parameter : module.parameters())
    (parameter.dim() < 2 ? others : matrices).params.push_back(parameter);
  return {optim::AdamW({matrices, others}, {.lr = options.lr, .betas = {0.9, 0.95}}),
          {.scheduler = optim::WarmupCosineLR::make(
               {.warmup_steps = warmup_steps, .total_steps = total_steps, .min_lr_ratio = kMinLrRatio}),
           .interval = "step"}};
}

void SampleOptions::describe(FieldVisitor& visit) {
  visit({.name = "length", .help = "characters to write at the end", .min = 0}, &length);
  visit({.name = "temperature", .help = "softmax temperature; 0 always takes the likeliest", .min = 0}, &temperature);
  visit({.name = "prompt", .help = "text that the sample continues"}, &prompt);
}

std::string sample(LanguageModel& model, const SampleOptions& options, uint64_t seed) {
  check(options);
  const at::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto device = model.parameters().front().device();
  const std::vector<uint8_t> prompt(options.prompt.begin(), options.prompt.end());
  auto tokens = torch::tensor(prompt, at::kLong).to(device);
  std::string text;
  while (std::ssize(text) < options.length) {
    const auto visible = tokens.slice(0, std::max<int64_t>(0, tokens.size(0) - *model.options().context));
    const auto next = next_token(model.forward(visible.unsqueeze(0))[0][-1], options.temperature, generator);
    text += static_cast<char>(next.item<int64_t>());
    tokens = at::cat({tokens, next.to(device)});
  }
  model.train(was_training);
  return text;
}

}  // namespace transformer_lm
