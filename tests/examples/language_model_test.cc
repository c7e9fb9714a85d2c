#include "examples/transformer_lm/language_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/testing/errors.h"

namespace transformer_lm {
namespace {

using fulgur::testing::message_of;
using ::testing::HasSubstr;

const LanguageModelOptions kTiny{.n_layer = 2, .n_head = 2, .n_embd = 16, .context = 12};

std::shared_ptr<LanguageModel> tiny_model() {
  fulgur::seed_everything(1);
  const auto model = fulgur::make_module<LanguageModel>(kTiny);
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters())
    parameter.mul_(10.0);  // far from uniform, so that a leak would show
  return model;
}

at::Tensor tokens() { return at::arange(24, at::kLong).view({2, 12}) + 65; }

TEST(LanguageModel, ALaterCharacterDoesNotChangeEarlierLogits) {
  const auto model = tiny_model();
  model->eval();
  const at::Tensor before = model->forward(tokens());
  for (int64_t changed = 0; changed < 12; ++changed) {
    at::Tensor other = tokens();
    other.select(1, changed).fill_(33);
    const at::Tensor after = model->forward(other);
    EXPECT_TRUE(after.slice(1, 0, changed).equal(before.slice(1, 0, changed))) << changed;
    for (int64_t i = changed; i < 12; ++i) {
      EXPECT_FALSE(after.select(1, i).allclose(before.select(1, i))) << changed << " " << i;
    }
  }
}

TEST(LanguageModel, TheGradientOfALossReachesNoLaterPosition) {
  const auto model = tiny_model();
  model->forward(tokens().slice(0, 0, 1)).select(1, 4).sum().backward();
  const at::Tensor grad = model->named_parameters()["position_embedding.weight"].grad().abs().sum(1);
  EXPECT_GT(grad.slice(0, 0, 5).min().item<double>(), 0.0);
  EXPECT_EQ(grad.slice(0, 5).max().item<double>(), 0.0);
}

TEST(LanguageModel, HeadIsTheTokenEmbedding) {
  const auto named = tiny_model()->named_parameters();
  EXPECT_TRUE(named["head.weight"].is_same(named["token_embedding.weight"]));
}

TEST(LanguageModel, BeginsNearTheUniformDistributionWithGpt2sWeights) {
  fulgur::seed_everything(1);
  const auto model = fulgur::make_module<LanguageModel>({.n_layer = 8, .context = 32});
  const at::Tensor log_probability = model->forward(at::arange(32, at::kLong).unsqueeze(0)).log_softmax(2);
  EXPECT_NEAR(-log_probability.mean().item<double>(), std::log(256.0), 0.1);
  const auto std_of = [&](const char* name) { return model->named_parameters()[name].std().item<double>(); };
  EXPECT_NEAR(std_of("token_embedding.weight"), 0.02, 0.0005);
  EXPECT_NEAR(std_of("blocks.3.mlp.expand.weight"), 0.02, 0.0005);
  EXPECT_NEAR(std_of("blocks.3.mlp.project.weight"), 0.02 / 4, 0.0005);
  EXPECT_NEAR(std_of("blocks.3.attention.project.weight"), 0.02 / 4, 0.0005);
}

TEST(LanguageModel, TheArticlesSizeHasItsNumberOfParameters) {
  const LanguageModel model({.size = "article"});
  int64_t count = 0;
  for (const auto& parameter : model.named_parameters()) {
    if (parameter.key() != "head.weight") count += parameter.value().numel();  // the head is the token embedding
  }
  // GPT-2 small has 50,257 tokens where this model has 256, and 124,439,808 parameters.
  EXPECT_EQ(count + 768 * (50'257 - 256), 124'439'808);
  EXPECT_EQ(model.options().n_head, 12);
}

TEST(LanguageModel, DimensionsThatAreGivenReplaceThoseOfTheSize) {
  LanguageModelOptions options{.size = "article", .n_layer = 1, .context = 128};
  TextDataOptions data;
  link_options(options, data);
  EXPECT_EQ(data.context, 128);
  const LanguageModel model(options);
  EXPECT_EQ(model.named_parameters()["position_embedding.weight"].sizes(), (std::vector<int64_t>{128, 768}));
  EXPECT_FALSE(model.named_parameters().contains("blocks.1.attention.qkv.weight"));
  EXPECT_EQ(LanguageModel(LanguageModelOptions{}).options().context, 64);
}

TEST(LanguageModel, OptionsThatCannotBeUsedAreRefused) {
  const auto refusal = [](const LanguageModelOptions& options) {
    return message_of<fulgur::UsageError>([&] { LanguageModel{options}; });
  };
  EXPECT_THAT(refusal({.n_head = 3, .n_embd = 128}), HasSubstr("n_embd (128) must be a multiple of n_head (3)"));
  EXPECT_THAT(refusal({.size = "large"}), HasSubstr("article"));
  EXPECT_THAT(refusal({.n_layer = 0}), HasSubstr("n_layer must be at least 1; got 0"));
}

TEST(LanguageModel, TextLongerThanTheContextIsRefused) {
  EXPECT_THAT(message_of<c10::ValueError>([] { tiny_model()->forward(at::zeros({1, 13}, at::kLong)); }),
              HasSubstr("13 characters long, but the model looks back on 12"));
}

TEST(Sample, TheSameSeedWritesTheSameText) {
  const auto model = fulgur::make_module<LanguageModel>(kTiny);  // near uniform, so that chance decides
  const SampleOptions options{.length = 40, .temperature = 1.0, .prompt = "ab"};
  const std::string text = sample(*model, options, 1);
  EXPECT_EQ(std::ssize(text), 40);
  EXPECT_EQ(sample(*model, options, 1), text);
  EXPECT_NE(sample(*model, options, 2), text);
  EXPECT_TRUE(model->is_training());
}

TEST(Sample, TemperatureZeroTakesTheLikeliest) {
  const auto model = tiny_model();
  model->eval();
  const std::string text = sample(*model, {.length = 1, .temperature = 0.0, .prompt = "AB"}, 1);
  const at::Tensor likeliest = model->forward(torch::tensor({65, 66}, at::kLong).unsqueeze(0))[0][1].argmax();
  EXPECT_EQ(text, std::string(1, static_cast<char>(likeliest.item<int64_t>())));
}

TEST(Sample, AnEmptyPromptIsRefused) {
  EXPECT_THAT(message_of<fulgur::UsageError>([] { sample(*tiny_model(), {.prompt = ""}, 1); }),
              HasSubstr("sample.prompt must have at least one character"));
}

}  // namespace
}  // namespace transformer_lm
