#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "examples/transformer_lm/text_data.h"
#include "fulgur.h"

namespace transformer_lm {

// What a trained model writes.
struct SampleOptions {
  int64_t length = 300;         // characters to write
  double temperature = 0.8;     // softmax temperature; lower is safer, 0 always takes the likeliest
  std::string prompt = "The ";  // start of the sample; at least one character
  void describe(fulgur::FieldVisitor& visit);
};

struct LanguageModelOptions {
  // Which n_layer, n_head, n_embd and context a model has that are not given: 4, 4, 128 and 64 by "default", and GPT-2
  // small's 12, 12, 768 and 1024 by "article".
  std::string size = "default";
  std::optional<int64_t> n_layer{};
  std::optional<int64_t> n_head{};
  std::optional<int64_t> n_embd{};   // width of a token's vector; a multiple of n_head
  std::optional<int64_t> context{};  // characters that the model looks back on, the present one included
  double dropout = 0.0;
  double lr = 2e-3;           // the peak of the schedule
  double warmup = 0.05;       // fraction of all steps in which the learning rate rises
  double weight_decay = 0.1;  // for matrices; biases and norms have none
  SampleOptions sample{};
  void describe(fulgur::FieldVisitor& visit);
};

// Sets the dimensions that are not given, and cuts the text into as many characters as the model looks back on.
void link_options(LanguageModelOptions& model, TextDataOptions& data);

// A GPT-2 on bytes: embeddings of the character and its position, pre-norm blocks of causal attention and a GELU MLP, a
// last norm, and an output head that is the token embedding. AdamW; a linear warm-up, then half a cosine to a tenth.
// Logs train_bpc and val_bpc, bits per character: the mean cost of the next character in base 2.
// Batches: "tokens", uint8 [batch_size, up to context + 1]; all but the last are read, all but the first predicted.
// Throws UsageError for options that cannot be used.
// Source: Radford et al. 2019 (GPT-2), with its initial weights; Press and Wolf 2017, arXiv:1608.05859, for the head.
class LanguageModel final : public fulgur::Module {
 public:
  using Options = LanguageModelOptions;
  explicit LanguageModel(Options options);

  // tokens: int64 [batch_size, length up to context]. Returns logits [batch_size, length, 256] of each next token.
  at::Tensor forward(const at::Tensor& tokens);

  at::Tensor training_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  void validation_step(const fulgur::Batch& batch, int64_t batch_idx) override;
  fulgur::Optimizers configure_optimizers() override;

  const Options& options() const { return options_; }  // all dimensions have a value

 private:
  void initialize();

  Options options_;
  torch::nn::Embedding token_embedding_{nullptr}, position_embedding_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Sequential blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};  // shares the weight of token_embedding_
};

// AdamW for the parameters of a module, with the weight decay and the schedule of the options.
fulgur::Optimizers optimizers_of(const fulgur::Module& module, const LanguageModelOptions& options);

// Continues the prompt, character by character, on the model's device; returns what follows the prompt. The same seed
// gives the same text. The model is in its former mode afterwards. Throws UsageError for options that cannot be used.
std::string sample(LanguageModel& model, const SampleOptions& options, uint64_t seed);

}  // namespace transformer_lm
