#pragma once

#include <cstdint>
#include <filesystem>

#include "fulgur.h"

namespace bert_classifier {

// The sizes of a BERT, and the constant of its norms; by default those of BERT-base.
struct BertSizes {
  int64_t hidden = 768;
  int64_t num_layers = 12;
  int64_t num_heads = 12;
  int64_t intermediate = 3072;
  int64_t max_length = 512;  // tokens
  int64_t vocab_size = 30522;
  double norm_eps = 1e-12;  // added to the variance in each layer norm

  // Reads the config.json of the Hugging Face hub. Throws UsageError, naming file and key, for a file that is not of a
  // BERT, or of one whose activation is not the exact GELU.
  static BertSizes read(const std::filesystem::path& config);
};

// An encoder of text: embeddings of token, position and segment (every token is of the first segment), then layers of
// attention and a GELU MLP with a norm behind each sum, then the pooler, a dense layer with tanh on the first token.
// Dropout of 0.1 where the paper has it. Source: Devlin et al. 2018, arXiv:1810.04805.
class BertImpl final : public torch::nn::Module {
 public:
  explicit BertImpl(const BertSizes& sizes);

  struct Output {
    at::Tensor hidden;  // for each token, float [batch_size, length, sizes.hidden]
    at::Tensor pooled;  // for the whole text, float [batch_size, sizes.hidden]
  };

  // input_ids, attention_mask: int64 [batch_size, length up to max_length]; the mask is 0 for padding.
  Output forward(const at::Tensor& input_ids, const at::Tensor& attention_mask);

  // Takes the weights of a folder of the hub, or of a model.safetensors. Throws CheckpointError, naming tensors and
  // sizes, for weights of another model.
  void load_huggingface(const std::filesystem::path& weights);

 private:
  BertSizes sizes_;
  torch::nn::Embedding token_embedding_{nullptr}, position_embedding_{nullptr}, segment_embedding_{nullptr};
  torch::nn::LayerNorm embedding_norm_{nullptr};
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::Sequential layers_{nullptr};
  torch::nn::Linear pooler_{nullptr};
};
TORCH_MODULE(Bert);

}  // namespace bert_classifier
