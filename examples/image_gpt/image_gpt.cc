#include "examples/image_gpt/image_gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "examples/image_gpt/pixels.h"

namespace image_gpt {
namespace {

using namespace fulgur;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kStart = kNumLevels;  // the token in front of the first pixel

struct Sizes {
  int64_t n_layer, n_head, width;
};

Sizes sizes_of(const ImageGptOptions& options) {
  check_fields("ImageGpt", options);
  if (options.size == "article") return {.n_layer = 24, .n_head = 8, .width = 512};
  return {.n_layer = 6, .n_head = 4, .width = 64};
}

nn::LayerNorm norm(int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

class BlockImpl final : public nn::Module {
 public:
  explicit BlockImpl(const Sizes& sizes) : n_head_(sizes.n_head) {
    const int64_t width = sizes.width;
    attention_norm_ = register_module("attention_norm", norm(width));
    qkv_ = register_module("qkv", nn::Linear(width, 3 * width));
    attention_project_ = register_module("attention_project", nn::Linear(width, width));
    mlp_ = register_module("mlp", nn::Sequential({{"norm", nn::AnyModule(norm(width))},
                                                  {"expand", nn::AnyModule(nn::Linear(width, 4 * width))},
                                                  {"gelu", nn::AnyModule(nn::GELU())},
                                                  {"project", nn::AnyModule(nn::Linear(4 * width, width))}}));
  }

  at::Tensor forward(const at::Tensor& x) {  // x and the result: [batch_size, length, width]
    const auto attended = x + attend(attention_norm_->forward(x));
    return attended + mlp_->forward(attended);
  }

 private:
  at::Tensor attend(const at::Tensor& x) {
    const auto qkv = qkv_->forward(x).unflatten(2, {3, n_head_, -1}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                        /*is_causal=*/true);
    return attention_project_->forward(mixed.transpose(1, 2).flatten(2));
  }

  int64_t n_head_;
  nn::LayerNorm attention_norm_{nullptr};
  nn::Linear qkv_{nullptr}, attention_project_{nullptr};
  nn::Sequential mlp_{nullptr};
};
TORCH_MODULE(Block);

at::Tensor all_but_last(const at::Tensor& pixels) { return pixels.slice(1, 0, -1); }

}  // namespace

void ImageGptOptions::describe(FieldVisitor& visit) {
  visit({.name = "size",
         .help = "which model: one for two cores, or the article's iGPT-S",
         .choices = {"small", "article"}},
        &size);
  visit({.name = "lr", .help = "learning rate at its peak", .min = 0}, &lr);
  visit({.name = "warmup", .help = "fraction of all steps in which the learning rate rises", .min = 0, .max = 1},
        &warmup);
  visit({.name = "num_samples", .help = "digits to draw into samples.png after training; 0: none", .min = 0},
        &num_samples);
}

ImageGpt::ImageGpt(Options options, uint64_t seed) : options_(std::move(options)), seed_(seed) {
  const Sizes sizes = sizes_of(options_);
  token_embedding_ = register_module("token_embedding", nn::Embedding(kNumLevels + 1, sizes.width));
  position_embedding_ = register_module("position_embedding", nn::Embedding(kNumPixels, sizes.width));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < sizes.n_layer; ++i) blocks_->push_back(Block(sizes));
  norm_ = register_module("norm", norm(sizes.width));
  head_ = register_module("head", nn::Linear(nn::LinearOptions(sizes.width, kNumLevels).bias(false)));
  initialize();
}

// As in GPT-2, what is added to the residual stream starts smaller, the more blocks there are. GPT-2's deviation of
// 0.02 suits its width; at a width of 64 it makes the first epochs slow.
void ImageGpt::initialize() {
  const at::NoGradGuard no_grad;
  const double initial_std = 1.0 / std::sqrt(static_cast<double>(norm_->weight.numel()));
  const double residual_std = initial_std / std::sqrt(2.0 * static_cast<double>(n_layer()));
  for (const auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    if (name.ends_with("bias") || name == "head.weight") {
      parameter.value().zero_();
    } else if (parameter.value().dim() == 2) {
      parameter.value().normal_(0.0, name.ends_with("project.weight") ? residual_std : initial_std);
    }
  }
}

at::Tensor ImageGpt::hidden(const at::Tensor& pixels, int64_t num_blocks) {
  const auto start = at::full({pixels.size(0), 1}, kStart, pixels.options());
  const auto tokens = at::cat({start, pixels}, 1);
  const auto positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = token_embedding_->forward(tokens) + position_embedding_->forward(positions);
  for (int64_t i = 0; i < num_blocks; ++i) x = blocks_->at<BlockImpl>(static_cast<size_t>(i)).forward(x);
  return x;
}

at::Tensor ImageGpt::forward(const at::Tensor& pixels) {
  return head_->forward(norm_->forward(hidden(pixels, n_layer())));
}

at::Tensor ImageGpt::middle_features(const at::Tensor& pixels) {
  const auto middle = hidden(all_but_last(pixels), n_layer() / 2);
  return at::layer_norm(middle, middle.size(2)).mean(1).to(at::kFloat);
}

at::Tensor ImageGpt::training_step(const Batch& batch, int64_t) {
  const auto bpd = bits_per_dimension(*this, levels_of(batch["image"]));
  log("train_bpd", bpd, {.prog_bar = true});
  return bpd * std::numbers::ln2;  // nats, as is usual for a loss
}

void ImageGpt::validation_step(const Batch& batch, int64_t) {
  log("val_bpd", bits_per_dimension(*this, levels_of(batch["image"])), {.prog_bar = true});
}

void ImageGpt::test_step(const Batch& batch, int64_t) {
  log("test_bpd", bits_per_dimension(*this, levels_of(batch["image"])));
}

Optimizers ImageGpt::configure_optimizers() {
  const int64_t total_steps = estimated_stepping_batches();
  const auto warmup_steps = static_cast<int64_t>(options_.warmup * static_cast<double>(total_steps));
  return {optim::Adam(parameters(), {.lr = options_.lr, .betas = {0.9, 0.95}}),
          {.scheduler = optim::WarmupCosineLR::make({.warmup_steps = warmup_steps, .total_steps = total_steps}),
           .interval = "step"}};
}

at::Tensor bits_per_dimension(ImageGpt& model, const at::Tensor& pixels) {
  const auto logits = model.forward(all_but_last(pixels));
  return F::cross_entropy(logits.flatten(0, 1), pixels.flatten()) / std::numbers::ln2;
}

at::Tensor sample(ImageGpt& model, int64_t count, uint64_t seed) {
  const at::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto device = model.parameters().front().device();
  at::Tensor pixels = at::empty({count, 0}, at::kLong);
  while (pixels.size(1) < kNumPixels) {
    const auto next = model.forward(pixels.to(device)).select(1, -1).softmax(-1, at::kFloat).cpu();
    pixels = at::cat({pixels, at::multinomial(next, 1, /*replacement=*/false, generator)}, 1);
  }
  return pixels;
}

}  // namespace image_gpt
