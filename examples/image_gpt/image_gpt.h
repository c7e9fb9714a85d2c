#pragma once

#include <cstdint>
#include <string>

#include "fulgur.h"

namespace image_gpt {

struct ImageGptOptions {
  std::string size = "small";  // 6 blocks, 4 heads, 64 wide; "article": iGPT-S, 24 blocks, 8 heads, 512 wide
  double lr = 5e-3;            // the peak of the schedule
  double warmup = 0.05;        // fraction of all steps in which the learning rate rises
  int64_t num_samples = 64;    // digits to draw after training
  void describe(fulgur::FieldVisitor& visit);
};

// A GPT on pixels: a token is the grey level of a pixel, and each pixel is predicted from a start token and all pixels
// before it. Pre-norm blocks of causal attention and a GELU MLP, a last norm, and an output head that begins at zero:
// the first predictions are uniform. Adam without weight decay; a linear warm-up, then half a cosine to 0.
// Logs train_bpd, val_bpd and test_bpd, bits per dimension: the mean cost of a pixel in base 2.
// Batches: "image", float [batch_size, 1, 8, 8] in 0..1. The article reads 32 x 32 pixels of 512 colours; these images
// have 64 pixels of 17 levels, with any size of the model.
// Throws UsageError for options that cannot be used.
// Source: Chen et al. 2020, Generative Pretraining from Pixels (iGPT).
class ImageGpt final : public fulgur::Module {
 public:
  using Options = ImageGptOptions;
  ImageGpt(Options options, uint64_t seed);

  // pixels: int64 [batch_size, length], the first 0 to 63 pixels. Returns logits [batch_size, length + 1, 17] of the
  // pixels 0 to length.
  at::Tensor forward(const at::Tensor& pixels);

  // The features of a linear probe: the mean over the positions of the normalised output of block n_layer / 2. pixels:
  // int64 [batch_size, 64], of which the last is not read, as in training. Returns float [batch_size, width].
  at::Tensor middle_features(const at::Tensor& pixels);

  at::Tensor training_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void validation_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void test_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  fulgur::Optimizers configure_optimizers() override;

  const Options& options() const { return options_; }
  uint64_t seed() const { return seed_; }
  int64_t n_layer() const { return static_cast<int64_t>(blocks_->size()); }

 private:
  void initialize();
  at::Tensor hidden(const at::Tensor& pixels, int64_t num_blocks);

  Options options_;
  uint64_t seed_;
  torch::nn::Embedding token_embedding_{nullptr}, position_embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

// The mean cost of a pixel of whole images, int64 [batch_size, 64], in bits; a tensor of one element.
at::Tensor bits_per_dimension(ImageGpt& model, const at::Tensor& pixels);

// Draws images pixel by pixel, on the model's device. Returns int64 [count, 64], on the CPU; the same seed draws the
// same images.
at::Tensor sample(ImageGpt& model, int64_t count, uint64_t seed);

}  // namespace image_gpt
