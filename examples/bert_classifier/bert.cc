#include "examples/bert_classifier/bert.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/checkpoint/formats/huggingface.h"
#include "fulgur/checkpoint/load_weights.h"

namespace bert_classifier {
namespace {

using namespace fulgur;
namespace nn = torch::nn;

constexpr double kDropout = 0.1;
constexpr double kInitStd = 0.02;
constexpr int64_t kNumSegments = 2;

nn::LayerNorm norm(const BertSizes& sizes) {
  return nn::LayerNorm(nn::LayerNormOptions({sizes.hidden}).eps(sizes.norm_eps));
}

class LayerImpl final : public nn::Module {
 public:
  explicit LayerImpl(const BertSizes& sizes) : num_heads_(sizes.num_heads) {
    const int64_t width = sizes.hidden;
    query_ = register_module("query", nn::Linear(width, width));
    key_ = register_module("key", nn::Linear(width, width));
    value_ = register_module("value", nn::Linear(width, width));
    project_ = register_module("project", nn::Linear(width, width));
    attention_norm_ = register_module("attention_norm", norm(sizes));
    expand_ = register_module("expand", nn::Linear(width, sizes.intermediate));
    contract_ = register_module("contract", nn::Linear(sizes.intermediate, width));
    output_norm_ = register_module("output_norm", norm(sizes));
    dropout_ = register_module("dropout", nn::Dropout(kDropout));
  }

  // x and the result: [batch_size, length, hidden]; is_text: bool [batch_size, 1, 1, length]
  at::Tensor forward(const at::Tensor& x, const at::Tensor& is_text) {
    const auto heads = [&](nn::Linear& linear) {
      return linear->forward(x).unflatten(2, {num_heads_, -1}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(heads(query_), heads(key_), heads(value_), is_text,
                                                        is_training() ? dropout_->options.p() : 0.0);
    const auto attended = project_->forward(mixed.transpose(1, 2).flatten(2));
    const auto y = attention_norm_->forward(x + dropout_->forward(attended));
    return output_norm_->forward(y + dropout_->forward(contract_->forward(at::gelu(expand_->forward(y)))));
  }

 private:
  int64_t num_heads_;
  nn::Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, project_{nullptr}, expand_{nullptr}, contract_{nullptr};
  nn::LayerNorm attention_norm_{nullptr}, output_norm_{nullptr};
  nn::Dropout dropout_{nullptr};
};
TORCH_MODULE(Layer);

// Maps the hub's names to ours: those of a bare encoder, and those of BertForPreTraining, which begin with "bert." and
// have heads of their own. Files of before 2019 call the parameters of a norm gamma and beta.
NameMap names_of(const BertSizes& sizes) {
  NameMap names{.rules = {{"cls.", std::nullopt}}};
  const auto add = [&](const std::string& from, const std::optional<std::string>& to) {
    for (const char* prefix : {"", "bert."}) {
      if (to && from.ends_with("LayerNorm.")) {
        names.rules.push_back({prefix + from + "gamma", *to + "weight"});
        names.rules.push_back({prefix + from + "beta", *to + "bias"});
      }
      names.rules.push_back({prefix + from, to});
    }
  };
  add("embeddings.word_embeddings.", "token_embedding.");
  add("embeddings.position_embeddings.", "position_embedding.");
  add("embeddings.token_type_embeddings.", "segment_embedding.");
  add("embeddings.LayerNorm.", "embedding_norm.");
  add("embeddings.position_ids", std::nullopt);
  add("pooler.dense.", "pooler.");
  const std::pair<const char*, const char*> of_layer[] = {{"attention.self.query.", "query."},
                                                          {"attention.self.key.", "key."},
                                                          {"attention.self.value.", "value."},
                                                          {"attention.output.dense.", "project."},
                                                          {"attention.output.LayerNorm.", "attention_norm."},
                                                          {"intermediate.dense.", "expand."},
                                                          {"output.dense.", "contract."},
                                                          {"output.LayerNorm.", "output_norm."}};
  for (int64_t i = 0; i < sizes.num_layers; ++i) {
    for (const auto& [from, to] : of_layer) {
      add(fmt::format("encoder.layer.{}.{}", i, from), fmt::format("layers.{}.{}", i, to));
    }
  }
  return names;
}

}  // namespace

BertSizes BertSizes::read(const std::filesystem::path& config) {
  std::ifstream file(config);
  if (!file) throw UsageError(fmt::format("there is no file '{}', which a folder of the hub has", config.string()));
  try {
    const auto json = nlohmann::json::parse(file);
    if (const auto type = json.at("model_type").get<std::string>(); type != "bert") {
      throw UsageError(fmt::format("{} is of a model of type '{}'; a 'bert' is needed", config.string(), type));
    }
    if (const auto activation = json.value("hidden_act", "gelu"); activation != "gelu") {
      throw UsageError(fmt::format("{} has the hidden_act '{}'; only 'gelu' is known: give a BERT that has it",
                                   config.string(), activation));
    }
    const BertSizes sizes{.hidden = json.at("hidden_size"),
                          .num_layers = json.at("num_hidden_layers"),
                          .num_heads = json.at("num_attention_heads"),
                          .intermediate = json.at("intermediate_size"),
                          .max_length = json.at("max_position_embeddings"),
                          .vocab_size = json.at("vocab_size"),
                          .norm_eps = json.value("layer_norm_eps", BertSizes{}.norm_eps)};
    if (sizes.num_heads < 1 || sizes.hidden % sizes.num_heads != 0) {
      throw UsageError(fmt::format("{} has a hidden_size of {}, which its num_attention_heads, {}, do not divide",
                                   config.string(), sizes.hidden, sizes.num_heads));
    }
    return sizes;
  } catch (const nlohmann::json::exception& error) {
    throw UsageError(fmt::format("{} is no config.json of a BERT: {}", config.string(), error.what()));
  }
}

BertImpl::BertImpl(const BertSizes& sizes) : sizes_(sizes) {
  token_embedding_ = register_module("token_embedding", nn::Embedding(sizes.vocab_size, sizes.hidden));
  position_embedding_ = register_module("position_embedding", nn::Embedding(sizes.max_length, sizes.hidden));
  segment_embedding_ = register_module("segment_embedding", nn::Embedding(kNumSegments, sizes.hidden));
  embedding_norm_ = register_module("embedding_norm", norm(sizes));
  dropout_ = register_module("dropout", nn::Dropout(kDropout));
  layers_ = register_module("layers", nn::Sequential());
  for (int64_t i = 0; i < sizes.num_layers; ++i) layers_->push_back(Layer(sizes));
  pooler_ = register_module("pooler", nn::Linear(sizes.hidden, sizes.hidden));
  const at::NoGradGuard no_grad;
  for (const auto& parameter : named_parameters()) {
    if (parameter.value().dim() > 1) parameter.value().normal_(0.0, kInitStd);
    if (parameter.key().ends_with("bias")) parameter.value().zero_();
  }
}

BertImpl::Output BertImpl::forward(const at::Tensor& input_ids, const at::Tensor& attention_mask) {
  const auto positions = at::arange(input_ids.size(1), input_ids.options());
  const auto embedded = token_embedding_->forward(input_ids) + position_embedding_->forward(positions) +
                        segment_embedding_->forward(at::zeros_like(input_ids));
  auto hidden = dropout_->forward(embedding_norm_->forward(embedded));
  const auto is_text = attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(2);
  for (auto& layer : *layers_) hidden = layer.forward(hidden, is_text);
  return {.hidden = hidden, .pooled = at::tanh(pooler_->forward(hidden.select(1, 0)))};
}

void BertImpl::load_huggingface(const std::filesystem::path& weights) {
  load_weights(*this, read_huggingface(weights, names_of(sizes_)), weights.string());
}

}  // namespace bert_classifier
